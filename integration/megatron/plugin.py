"""Builds Megatron-core models of the reference operators, and scores tokens with them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from integration.backends import BackendError, check_profile, operators_for
from integration.versions import Patch, apply_patches, check_version
from reference.primitives import RopeParameters

Tensor = Any
#: Release series that were read and tested.
SUPPORTED = ("0.16", "0.19")
#: Modules that compute no boundary: of the rotary embeddings only positions are read.
_WITHOUT_ARITHMETIC = ("RotaryEmbedding", "YarnRotaryEmbedding", "Dropout", "IdentityOp", "IdentityFuncOp")
_profile: str | None = None


def _strict_rope(original: Any) -> Any:
    from integration.megatron.modules import strict_rope

    return strict_rope(original)


#: Everything that a ModuleSpec cannot say. Models without a strict profile in the same process are not affected.
PATCHES = (
    Patch(
        module="megatron.core.transformer.attention",
        attribute="apply_rotary_pos_emb",
        versions=SUPPORTED,
        why="attention calls RoPE as a function by name",
        make=_strict_rope,
    ),
)


def prepare(profile: str) -> None:
    """Choose ``profile`` for the models that this process builds next.

    Raises:
        UnknownVersionError: a release of Megatron-core that is not known here.
        ValueError: an unknown profile, or one that describes an engine.
    """
    global _profile
    check_profile(profile)
    import megatron.core

    check_version("megatron-core", megatron.core.__version__, SUPPORTED)
    _profile = profile


def specification(config: Any, theta: float | RopeParameters, *, device: str = "cpu") -> Any:
    """The decoder's specification with our modules, for a TransformerConfig of the local one.

    Args:
        theta: of RoPE, or all its parameters. The profile is the one of `prepare`; it becomes part of ``config``.
        device: on which the model will compute: "cpu", or "cuda", which is a ROCm GPU's name too.

    Raises:
        BackendError: nothing computes the profile there.
        TypeError: a configuration with fusions, dropout or parallelism that has no strict contract.
    """
    import megatron.core
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from integration.megatron import modules

    if _profile is None:
        raise RuntimeError("no strict profile is chosen: call prepare first")
    _check_config(config)
    apply_patches("megatron-core", megatron.core.__version__, PATCHES)
    own = operators_for(_profile, config.params_dtype, device)
    setattr(config, modules.OPERATORS, own)
    config.rlk_theta = theta
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    attention = dataclasses.replace(
        parts.self_attention.submodules,
        linear_qkv=modules.StrictColumnParallelLinear,
        core_attention=modules.StrictCoreAttention,
        linear_proj=modules.StrictRowParallelLinear,
    )
    if config.qk_layernorm:
        attention = dataclasses.replace(
            attention, q_layernorm=modules.StrictHeadNorm, k_layernorm=modules.StrictHeadNorm
        )
    # 0.19 names the MLP's builder where 0.16 names its class
    builder = parts.mlp if isinstance(parts.mlp, functools.partial) else None
    mlp = dataclasses.replace(
        parts.mlp.submodules if builder is None else builder.keywords["submodules"],
        linear_fc1=modules.StrictColumnParallelLinear,
        linear_fc2=modules.StrictRowParallelLinear,
    )
    add = modules.bias_dropout_add(own)
    strict = dataclasses.replace(
        parts,
        input_layernorm=modules.StrictNorm,
        self_attention=dataclasses.replace(parts.self_attention, submodules=attention),
        self_attn_bda=add,
        pre_mlp_layernorm=modules.StrictNorm,
        mlp=ModuleSpec(module=modules.StrictMLP, submodules=mlp)
        if builder is None
        else functools.partial(modules.StrictMLP.as_mlp_submodule, submodules=mlp),
        mlp_bda=add,
    )
    dense = dataclasses.replace(layer, submodules=strict)
    layers = [dense] * config.num_layers
    if config.num_moe_experts:
        from integration.experts import use_renormalisation
        from integration.megatron import experts

        if device != "cpu":
            raise BackendError(f"profile {_profile}: a mixture of experts has no strict path on a GPU yet")
        # The softmax of the chosen logits is that of all of them, divided by the chosen ones' sum.
        use_renormalisation(own, not config.moe_router_pre_softmax)
        sparse = dataclasses.replace(layer, submodules=dataclasses.replace(strict, mlp=experts.specification(mlp)))
        layers = [sparse if config.moe_layer_freq[n] else dense for n in range(config.num_layers)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=modules.StrictNorm)


def _check_config(config: Any) -> None:
    unknown = {
        "sequence_parallel": config.sequence_parallel,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size > 1,
        "context_parallel_size": config.context_parallel_size > 1,
        "hidden_dropout": config.hidden_dropout,
        "apply_rope_fusion": config.apply_rope_fusion,
    }
    if config.num_moe_experts:
        from integration.megatron.experts import unknown_settings

        unknown |= unknown_settings(config)
        # A number means every so manieth layer: the list is what diffcheck builds.
        unknown["moe_layer_freq that is no list"] = not isinstance(config.moe_layer_freq, list)
    if any(unknown.values()):
        raise TypeError(f"no strict contract for {', '.join(name for name, on in unknown.items() if on)}")


def finish(model: Any) -> Any:
    """Turn the two modules that GPTModel builds without a specification, embedding and output layer, into ours.

    Parameters, names and attributes stay what they are; only the forward is another.

    Returns:
        ``model``.

    Raises:
        TypeError: they are not the modules that were expected.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding

    from integration.megatron import modules

    own = modules.operators_of(model.config)
    for module, native, strict in (
        (model.embedding.word_embeddings, VocabParallelEmbedding, modules.StrictEmbedding),
        (model.output_layer, ColumnParallelLinear, modules.StrictOutputLayer),
    ):
        if type(module) is not native:
            raise TypeError(f"expected {native.__name__}, found {type(module).__name__}")
        # Not a new module in its place: Megatron's constructor has sharded and registered its weight already.
        module.__class__ = strict
        setattr(module, modules.OPERATORS, own)
    model.config.rlk_rope = modules.LiveRope(model.rotary_pos_emb, model.config.rlk_theta)
    return model


def _as_it_is(_name: str, value: Tensor) -> Tensor:
    return value


def logprobs(
    model: Any,
    logits: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    see: Callable[[str, Tensor], Tensor] = _as_it_is,
) -> Tensor:
    """Log-probabilities of ``targets``, differentiable.

    Args:
        logits: this rank's, [batch, sequence, vocabulary / ranks], float32.
        targets: integers, [batch, sequence].
        vocabulary: number of real columns over all ranks.
        see: is shown "processed_logits" [batch, sequence, vocabulary] and "logsumexp" [batch, sequence, 1], and
            returns what to go on with.

    Returns:
        float32, [batch, sequence].
    """
    from integration.megatron import functions, modules

    own = modules.operators_of(model.config)
    group = model.output_layer.tp_group
    group = None if group is None or group.size() == 1 else group
    rows = logits.reshape(-1, logits.shape[-1])
    processed = functions.ProcessedLogits.apply(own, rows, vocabulary, (temperature, top_k, top_p), group)
    processed = see("processed_logits", processed.reshape(*targets.shape, -1)).reshape(-1, vocabulary)

    def see_lse(value: Tensor) -> Tensor:
        return see("logsumexp", value.reshape(*targets.shape, 1)).reshape(-1, 1)

    return functions.LogProb.apply(own, processed, targets.reshape(-1), see_lse).reshape(targets.shape)


def live_operators(model: Any) -> Any:
    """What the live model computes with, for whoever changes a contract or a function on purpose."""
    from integration.megatron import modules

    return modules.operators_of(model.config)


def begin(model: Any) -> None:
    """Check that every module is ours, and count from zero.

    Raises:
        RuntimeError: a module with arithmetic of its own is Megatron's or PyTorch's.
    """
    from integration.megatron import modules

    native = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not list(module.children())
        and not type(module).__module__.startswith("integration.")
        and type(module).__name__ not in _WITHOUT_ARITHMETIC
    ]
    if native:
        raise RuntimeError(f"the strict path is not in place: {', '.join(native[:5])} would run natively")
    modules.operators_of(model.config).clear()


def evidence(model: Any, forwards: int) -> dict[str, Any]:
    """What ran since `begin`: operators with counts and contract ids, and patches.

    Raises:
        RuntimeError: an operator ran less often than ``forwards`` need: something else computed in its place.
    """
    from integration.megatron import modules

    own, layers = modules.operators_of(model.config), model.config.num_layers
    per_forward = {
        "embedding": 1,
        "rms_norm": 2 * layers + 1,
        "linear": 2 * layers,
        "rope": 2 * layers,
        "attention": layers,
        "row_linear": 2 * layers,
        "residual_add": 2 * layers,
        "swiglu": layers,
        "lm_head": 1,
        "logprob": 1,
    }
    if sparse := sum(hasattr(layer.mlp, "router") for layer in model.decoder.layers):
        per_forward |= {"moe_router": sparse, "moe_combine": sparse}
    for name, count in per_forward.items():
        if own.calls[name] < forwards * count:
            raise RuntimeError(f"{name} ran {own.calls[name]} times in {forwards} forwards of {layers} layers")
    return {**own.evidence(), "patches": [patch.describe() for patch in PATCHES], "fallbacks": 0}
