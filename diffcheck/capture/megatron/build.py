"""Builds the Megatron-core model that a configuration describes, or refuses by name what it cannot build."""

from __future__ import annotations

from typing import Any

import numpy as np

from diffcheck.base.errors import EngineError, InputError
from diffcheck.capture.live import torch_dtype
from diffcheck.capture.plan import EngineOptions
from reference.models.config import ModelConfig
from reference.primitives.rope_scaling import RopeParameters, float32_frequencies

_ULP = 8


def build(config: ModelConfig, options: EngineOptions, padded_vocab: int, strict: Any | None) -> Any:
    """GPTModel with every fusion off, without initial weights, in training mode.

    Raises:
        InputError: the configuration says something that this Megatron-core builds otherwise.
    """
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch_dtype(options)
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=config.o_bias,
        add_qkv_bias=config.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=options.tensor_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        **_windows(config),
        **_experts(config),
    )
    rope = config.rope
    if rope.kind == "yarn":
        for name, value in _yarn(rope).items():
            # Attributes of the configuration of another attention, read from any configuration that has them.
            setattr(settings, name, value)
    if strict is None and config.num_experts:
        layers = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm")
    elif strict is None:
        layers = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    else:
        try:
            layers = strict.specification(settings, config.rope_base, device=options.device)
        except RuntimeError as error:
            raise EngineError(f"megatron: {error}", "see rlk-diff doctor") from None
    model = GPTModel(
        settings,
        layers,
        vocab_size=padded_vocab,
        max_sequence_length=max(options.max_length, config.max_position_embeddings),
        position_embedding_type="yarn" if rope.kind == "yarn" else "rope",
        rotary_percent=config.partial_rotary_factor,
        rotary_base=config.rope_theta,
        seq_len_interpolation_factor=rope.factor if rope.kind == "linear" else None,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        parallel_output=True,
    )
    _scale_rope(model.rotary_pos_emb, config)
    if config.o_bias:
        for layer in model.decoder.layers:
            # add_bias_linear gives the MLP biases too, which no supported model has.
            if not hasattr(layer.mlp, "linear_fc1"):
                raise InputError("megatron: attention_bias in a mixture of experts", "Megatron-core would add others")
            layer.mlp.linear_fc1.bias = layer.mlp.linear_fc2.bias = None
    if strict is not None:
        strict.finish(model)
    # Norms are created in float32; a mixed-precision trainer casts the whole module, and so do we.
    return model.to(dtype=dtype, device=options.device).train()


def _windows(config: ModelConfig) -> dict[str, Any]:
    """Megatron counts the keys before a query's own, and has one size for all layers with a window."""
    sizes = {w for w in config.layer_windows if w is not None}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise InputError(f"megatron: windows of {sorted(sizes)} keys in one model", "Megatron-core has one window size")
    return {
        "window_size": (sizes.pop() - 1, 0),
        "window_attn_skip_freq": [int(w is not None) for w in config.layer_windows],
    }


def _experts(config: ModelConfig) -> dict[str, Any]:
    """Megatron takes the softmax before the choice or after it; after it is what dividing by the sum comes to."""
    if not config.num_experts:
        return {}
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 asks whether this name of Transformer Engine's is None, and forgets to say so where there is none.
        moe_utils.te_general_gemm = None
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": [int(config.is_sparse(n)) for n in range(config.num_hidden_layers)],
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "allgather",
    }


def _yarn(rope: RopeParameters) -> dict[str, Any]:
    """Megatron derives the attention factor from two numbers; any factor is one of the first with the second 0."""
    import math

    mscale = (rope.attention_factor - 1) / (0.1 * math.log(rope.factor)) if rope.factor > 1 else 1.0
    made = 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    if np.float32(made) != np.float32(rope.attention_factor):
        raise InputError(
            f"megatron: yarn with attention_factor {rope.attention_factor} and factor {rope.factor}",
            "this Megatron-core derives the attention factor from the factor",
        )
    return {
        "yarn_rotary_scaling_factor": rope.factor,
        "yarn_original_max_position_embeddings": rope.original_max_position_embeddings,
        "yarn_beta_fast": rope.beta_fast,
        "yarn_beta_slow": rope.beta_slow,
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": rope.truncate,
    }


def _scale_rope(rotary: Any, config: ModelConfig) -> None:
    """Llama 3's frequencies, by Megatron's own function with the configuration's numbers: its switch has fixed ones.
    Then the live frequencies must be those that the configuration gives.
    """
    rope = config.rope
    if rope.kind == "llama3":
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_position_embeddings=rope.original_max_position_embeddings,
        )
    angles = rotary.get_emb(2)
    angles = angles[0] if isinstance(angles, tuple) else angles
    live = angles[1, 0, 0, : angles.shape[-1] // 2].float().cpu().numpy()
    made = float32_frequencies(config.rotary_dim, rope)
    if live.shape != made.shape or (np.abs(live.view(np.int32).astype(np.int64) - made.view(np.int32)) > _ULP).any():
        raise InputError(
            f"megatron: rope {rope.describe()} with {config.rotary_dim} rotated features gives other frequencies there",
            "this Megatron-core builds another RoPE than the configuration says",
        )
