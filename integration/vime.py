"""Hook points of vime, an orchestrator of Megatron training and vLLM rollouts. See docs/vime.md.

    --linear-logp-provider integration.vime.linear_logp            (or strict_linear_logp)
    --custom-megatron-init-path integration.vime.megatron_init
    --custom-tis-function-path integration.vime.mismatch_metrics   (or strict_mismatch_metrics)

vime is not imported: requests are structural objects.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from diffcheck.base.errors import EngineError, RlkError
from integration.backends import STRICT, BackendError, Operators, operators_for
from integration.grpo.mismatch.metrics import log_ratios, mismatch, unequal_bits
from integration.linear_logp import contracts, joint_id
from integration.linear_logp import linear_logp as compute
from integration.linear_logp_request import RequestError, UnavailableError, checked
from integration.vllm.state import PROFILE

Tensor = Any
#: What `megatron_init` puts into ``args.spec``: Megatron imports and calls it.
SPEC = ["integration.vime", "layer_spec"]
#: Megatron's arguments, and the one value of each that the strict path covers.
_SETTINGS: dict[str, Any] = {
    "transformer_impl": "local",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_experts": None,
    "sequence_parallel": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "apply_layernorm_1p": False,
    "apply_rope_fusion": False,
    "use_rope_scaling": False,
    "rotary_interleaved": False,
    "multi_latent_attention": False,
    "fp8": None,
}
_operators: dict[tuple[str, torch.dtype], Operators] = {}


def linear_logp(request: Any) -> dict[str, Any]:
    """Logprobs of ``request.target_ids`` by the strict operators.

    The head is computed here where ``request.context`` has hidden states and projection; else ``request.logits`` are
    taken, which must be the strict head's, in float32.

    Returns:
        ``logp`` [T, 1] float32, attached to autograd; ``entropy`` [T] float32 or None, as asked; ``backend_id``;
        ``contract_id``, one for all operators; ``provenance``.

    Raises:
        UnavailableError: no strict contract covers the request. It asks for the native path, which vime takes in mode
            ``auto`` and refuses in mode ``strict``.
        RlkError: the request contradicts itself, or the computation failed: an error in both modes.
    """
    try:
        return _linear_logp(request)
    except RlkError:
        raise
    except Exception as error:
        # vime takes an AttributeError or ImportError of a provider for "not available": a fault here would turn into
        # a silent fallback.
        raise EngineError(
            f"linear_logp: {type(error).__name__}: {error}", "this is a fault of rlk: report it"
        ) from error


def strict_linear_logp(request: Any) -> dict[str, Any]:
    """`linear_logp`, closed: there is no native path, whatever vime's mode.

    Raises:
        RlkError: as `linear_logp`, and never one that asks for the native path.
    """
    try:
        return linear_logp(request)
    except UnavailableError as error:
        raise RequestError(f"linear_logp: {error.cause}", error.remedy) from None


def _linear_logp(request: Any) -> dict[str, Any]:
    problem = checked(request)
    profile = _profile()
    key = (profile, problem.dtype)
    if key not in _operators:
        _operators[key] = operators_for(*key)
    own = _operators[key]
    logp, entropy = compute(problem, own)
    ids = contracts(problem, own)
    return {
        "logp": logp[:, None],
        "entropy": entropy,
        "backend_id": _backend(own),
        "contract_id": joint_id(profile, ids),
        "provenance": {
            "rlk": version("rlk"),
            "profile": profile,
            "contracts": ids,
            "computed_from": "logits" if problem.hidden is None else "hidden and projection",
            "dtype": str(problem.dtype).removeprefix("torch."),
            "real_vocab_size": problem.vocabulary,
            "real_vocab_size_from": problem.vocabulary_from,
            "tensor_parallel_ranks": 1 if problem.group is None else problem.group.size(),
            "token_layout": request.token_layout.layout,
            "chunk_rows": problem.chunk,
            "temperatures": sorted(set(problem.temperatures)),
            "masked": problem.keep is not None,
            "fallbacks": 0,
        },
    }


def _profile() -> str:
    """The profile that the rollout follows too.

    Raises:
        UnavailableError: RLK_PROFILE is not set, or names none that an engine can follow.
    """
    profile = os.environ.get(PROFILE, "")
    if profile not in STRICT:
        raise UnavailableError(
            f"{PROFILE} is {profile!r}: the rollout follows no strict profile, so the trainer must not either",
            f"set it to one of {', '.join(STRICT)} in all processes",
        )
    return profile


def _backend(own: Operators) -> str:
    return f"rlk.cpu.{own.evidence()['loops'].rpartition('.')[2]}"


def megatron_init(args: Any) -> dict[str, Any]:
    """Make this training rank build strict models: chooses the profile of RLK_PROFILE, and the layer specification.

    Args:
        args: Megatron's arguments; ``spec`` is set to `layer_spec`.

    Returns:
        What was prepared: profile, release of Megatron-core, specification.

    Raises:
        EngineError: no strict profile, a release of Megatron-core that is not known, or settings without a strict
            contract, all of them named.
    """
    import megatron.core

    from integration.megatron import plugin

    profile = os.environ.get(PROFILE, "")
    if profile not in STRICT:
        raise EngineError(
            f"{PROFILE} is {profile!r}: no strict profile", f"set it to one of {', '.join(STRICT)} in all processes"
        )
    wrong = []
    for name, good in _SETTINGS.items():
        value = getattr(args, name, good)
        # None, 0 and False all say that something is off.
        if value != good and (value or good):
            wrong.append(f"{name}={value!r}")
    if wrong:
        raise EngineError(f"no strict contract for {', '.join(wrong)}", "turn these settings off")
    if getattr(args, "spec", None) not in (None, SPEC):
        raise EngineError(f"spec={args.spec!r} would replace the strict specification", "leave --spec out")
    try:
        plugin.prepare(profile)
    except RuntimeError as error:
        raise EngineError(str(error), "see rlk-diff doctor") from None
    args.spec = list(SPEC)
    return {"profile": profile, "megatron-core": megatron.core.__version__, "spec": ".".join(SPEC)}


def layer_spec(args: Any, config: Any, vp_stage: int | None = None) -> Any:
    """The strict decoder's specification, as Megatron asks for one through ``args.spec``.

    Raises:
        RlkError: virtual pipeline stages, or a configuration without a strict contract.
    """
    from integration.megatron import plugin

    if vp_stage:
        raise EngineError("virtual pipeline stages have no strict contract", "use one pipeline stage")
    try:
        device = "cuda" if torch.cuda.is_available() and not config.use_cpu_initialization else "cpu"
        return plugin.specification(config, float(args.rotary_base), device=device)
    except BackendError as error:
        raise EngineError(str(error), "see rlk-diff doctor") from None
    except TypeError as error:
        raise EngineError(str(error), "turn these settings off") from None


def mismatch_metrics(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """What rollout and trainer disagree on; loss and masks are handed back as they came.

    Args:
        train_log_probs, rollout_log_probs: a float32 tensor [tokens] a sample. loss_masks: the same shapes.

    Returns:
        pg_loss, loss_masks, and values a token [all tokens] that vime averages under its mask: ``rlk_mismatch`` (1
        where bits differ), ``rlk_abs_diff``, ``rlk_k1``, ``rlk_k3``. Any mismatch makes the average of the first
        positive.

    Raises:
        RequestError: the two sides are not float32 of the same tokens, or there are none.
    """
    rollout, train = _flat("rollout_log_probs", rollout_log_probs), _flat("train_log_probs", train_log_probs)
    if [len(x) for x in train_log_probs] != [len(x) for x in rollout_log_probs] or not rollout.size:
        raise RequestError(
            f"{rollout.size} rollout and {train.size} train logprobs", "pass logprobs of the same tokens, at least one"
        )
    difference = log_ratios(rollout, train)
    with np.errstate(over="ignore", invalid="ignore"):
        values = {
            "rlk_mismatch": unequal_bits(rollout, train),
            "rlk_abs_diff": np.abs(difference),
            "rlk_k1": -difference,
            "rlk_k3": np.expm1(difference) - difference,
        }
    device = train_log_probs[0].device
    tensors = {name: torch.from_numpy(value.astype(np.float32)).to(device) for name, value in values.items()}
    return pg_loss, list(loss_masks), tensors


def strict_mismatch_metrics(args: Any, **request: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """`mismatch_metrics`, closed: a token in the loss whose bits differ stops the run before it is trained on.

    Raises:
        EngineError: bits differ; names sample and position in its response.
    """
    found = mismatch_metrics(args, **request)
    masks = [np.asarray(mask.detach().cpu().numpy()) != 0 for mask in request["loss_masks"]]
    counted = np.concatenate(masks)
    rollout = _flat("rollout_log_probs", request["rollout_log_probs"])[counted]
    train = _flat("train_log_probs", request["train_log_probs"])[counted]
    if rollout.size:
        ids = [str(i) for i, mask in enumerate(masks) for _ in range(int(mask.sum()))]
        positions = [int(position) for mask in masks for position in np.flatnonzero(mask)]
        worst = mismatch(rollout, train, ids, positions)
        if worst.mismatch_count:
            raise EngineError(
                f"{worst.mismatch_count} of {worst.compared} logprobs differ, the most by {worst.max_abs_diff:.3g} "
                f"nats in sample {worst.max_abs_sample} of this batch, response token {worst.max_abs_position}",
                "rlk-diff localize names the boundary; save the batch with --save-debug-rollout-data",
            )
    return found


def _flat(label: str, parts: Sequence[Tensor]) -> np.ndarray[Any, np.dtype[np.float32]]:
    for part in parts:
        if not isinstance(part, torch.Tensor) or part.dtype != torch.float32 or part.dim() != 1:
            raise RequestError(f"{label}: wanted float32 tensors of one dimension, one a sample")
    arrays = [part.detach().cpu().numpy() for part in parts]
    return np.concatenate([np.empty(0, np.float32), *arrays])
