"""Which keys of a Hugging Face ``config.json`` are understood, which are known to be inert, and what the others change.

A key that can change the forward and is not read here would make a model of our own out of the user's: the two sides
would differ, or agree, for a reason that no comparison shows. So every key of the file is accounted for: `UNDERSTOOD`
keys are read by `reference.models.config`, `INERT` ones change no logit of a given sequence, `CHANGES` says what a
known one would change and at which values it changes nothing, and any other key stops the run by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Keys that `ModelConfig` reads.
UNDERSTOOD = _words(
    """architectures model_type hidden_act hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim vocab_size max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters
    partial_rotary_factor attention_bias mlp_bias tie_word_embeddings dtype torch_dtype use_sliding_window
    sliding_window max_window_layers layer_types"""
)
#: The architecture in which a router chooses experts.
MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"
#: Keys that `ModelConfig` reads of it, and only of it.
UNDERSTOOD_MOE = _words(
    """num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
    mlp_only_layers"""
)
#: Keys of it that change no logit of a given sequence: they are for training's auxiliary loss, and for telling of it.
INERT_MOE = _words("output_router_logits router_aux_loss_coef")
#: Keys of a rope dictionary that are read.
UNDERSTOOD_ROPE = _words(
    """rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast
    beta_slow attention_factor mscale mscale_all_dim truncate partial_rotary_factor"""
)
#: Keys that change no logit of a given sequence: names, training, generation, bookkeeping of libraries. The last lines
#: are what transformers 4 wrote into every config.
INERT = _words(
    """_name_or_path name_or_path transformers_version initializer_range use_cache bos_token_id eos_token_id
    pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id tokenizer_class id2label label2id
    num_labels problem_type finetuning_task task_specific_params prefix output_hidden_states output_attentions
    return_dict return_dict_in_generate pretraining_tp gradient_checkpointing use_flash_attn attn_implementation
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset _experts_implementation
    _experts_implementation_internal is_encoder_decoder is_decoder keys_to_ignore_at_inference model_max_length
    unsloth_version unsloth_fixed _unsloth_fix vllm_version transformers_js_config language license author
    torchscript tf_legacy_loss use_bfloat16 pruned_heads forced_bos_token_id forced_eos_token_id suppress_tokens
    begin_suppress_tokens max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores remove_invalid_values
    exponential_decay_length_penalty max_new_tokens bos_token eos_token tie_encoder_decoder add_cross_attention
    cross_attention_hidden_size tie_last_hidden_states"""
)

_MOE = "the MLP: a router would choose experts where a dense architecture has one MLP"
_ROUTING = "which experts a token passes through, or what they weigh: of a Qwen3-MoE only its own keys are understood"
_WINDOW = "which keys a query sees"
_ROPE = "the angles by which queries and keys are rotated"
_QUANTISED = "every product: weights or activations would be quantised"
_SCALE = "the size of what an operator hands on"
#: Key or pattern -> (values at which it changes nothing, what it would change). First match wins; null never changes.
CHANGES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "quantization_config": ((), _QUANTISED),
    "compression_config": ((), _QUANTISED),
    "quantization": ((), _QUANTISED),
    "auto_map": ((), "the whole forward: the folder brings model code of its own"),
    "per_layer_config": (({},), "single layers: each could have sizes and switches of its own"),
    "attention_dropout": ((0, 0.0), "attention in training mode, at random"),
    "*dropout*": ((0, 0.0, False), "activations in training mode, at random"),
    "*pdrop*": ((0, 0.0), "activations in training mode, at random"),
    "chunk_size_feed_forward": ((0,), "the rows that one product of the MLP sees at a time"),
    "mlp_only_layers": (([],), _MOE),
    "decoder_sparse_step": ((), _MOE),
    "first_k_dense_replace": ((), _MOE),
    "norm_topk_prob": ((), _MOE),
    "topk_method": ((), _MOE),
    "topk_group": ((), _MOE),
    "n_group": ((), _MOE),
    "scoring_func": ((), _MOE),
    "routed_scaling_factor": ((), _MOE),
    "shared_expert*": ((0,), "the MLP: shared experts, through which every token passes, are not specified here"),
    "n_shared_experts": ((0,), "the MLP: shared experts, through which every token passes, are not specified here"),
    "output_router_logits": ((False,), _MOE),
    "router_*": ((), _MOE),
    "*expert*": ((0,), _MOE),
    "*moe*": ((), _MOE),
    "*softcap*": ((), "attention scores or logits: they would be capped by a tanh"),
    "*soft_cap*": ((), "attention scores or logits: they would be capped by a tanh"),
    "logit_scale": ((1, 1.0), "the logits, by a factor"),
    "logits_scaling": ((1, 1.0), "the logits, by a factor"),
    "scale_emb": ((1, 1.0), "the embedding, by a factor"),
    "scale_depth": ((), "what each layer adds to the residual stream, by a factor"),
    "dim_model_base": ((), "the logits, by a factor"),
    "mup_*": ((), _SCALE),
    "*multiplier*": ((1, 1.0), _SCALE),
    "query_pre_attn_scalar": ((), "the scale of attention scores"),
    "attn_scale": ((), "the scale of attention scores"),
    "attention_scale": ((), "the scale of attention scores"),
    "softmax_scale": ((), "the scale of attention scores"),
    "scale_attn*": ((), "the scale of attention scores"),
    "attn_temperature_tuning": ((False, 0), "the scale of attention scores, by position"),
    "attention_chunk_size": ((), _WINDOW),
    "*window*": ((), _WINDOW),
    "is_causal": ((True,), _WINDOW),
    "use_bidirectional_attention": ((False,), _WINDOW),
    "dual_chunk_attention_config": ((), _WINDOW),
    "no_rope_layers": (([],), _ROPE),
    "no_rope_layer_interval": ((), _ROPE),
    "use_mrope": ((False,), _ROPE),
    "mrope_section": ((), _ROPE),
    "rope_interleaved": ((False,), _ROPE),
    "rope_interleave": ((False,), _ROPE),
    "original_max_position_embeddings": ((), _ROPE),
    "alibi": ((False,), "attention scores, by the distance of query and key"),
    "position_embedding_type": (("rope", "rotary"), "how a position enters the forward"),
    "*rope*": ((), _ROPE),
    "*rotary*": ((), _ROPE),
    "use_qk_norm": ((), "queries and keys, by a norm"),
    "qk_norm": ((), "queries and keys, by a norm"),
    "qk_layernorm": ((), "queries and keys, by a norm"),
    "use_post_norm": ((False,), "the residual stream, by further norms"),
    "*norm*": ((), "which norms run, or their epsilon"),
    "add_bias_linear": ((False,), "the projections, by a bias"),
    "use_bias": ((False,), "the projections, by a bias"),
    "bias": ((False,), "the projections, by a bias"),
    "lm_head_bias": ((False,), "the logits, by a bias"),
    "head_bias": ((False,), "the logits, by a bias"),
    "*bias*": ((False,), "a projection, by a bias"),
    "*sink*": ((), "the softmax of attention, by a sink"),
    "num_nextn_predict_layers": ((0,), "how many layers there are"),
    "kv_lora_rank": ((), "attention: keys and values would be compressed"),
    "q_lora_rank": ((), "attention: queries would be compressed"),
    "*lora*": ((), "the projections, by an adapter"),
    "*adapter*": ((), "the projections, by an adapter"),
    "head_dtype": ((), "the format of the logits"),
    "fp32_lm_head": ((False,), "the format of the logits"),
    "hidden_activation": (("silu",), "the activation of the MLP"),
    "activation_function": (("silu",), "the activation of the MLP"),
    "act_fn": (("silu",), "the activation of the MLP"),
    "block_configs": ((), "single layers: each could have sizes of its own"),
    "num_kv_shared_layers": ((0,), "which keys and values a layer reads"),
    "*_config": ((), "the model: it would be a part of a larger one"),
}
_UNKNOWN = "is not known here and may change the forward"


def unread_keys(config: Mapping[str, Any], architecture: str) -> Iterator[str]:
    """What is wrong with each key of ``config`` that may change the forward and is not read: one clause for all keys
    that would change the same.

    Args:
        config: the parsed file. architecture: the supported one that it names.
    """
    effects: dict[str, list[str]] = {}
    for key, value in config.items():
        if key in UNDERSTOOD or key in INERT or value is None or _is_own(key, value, architecture):
            continue
        if architecture == MOE_ARCHITECTURE and key in UNDERSTOOD_MOE | INERT_MOE:
            continue
        found = next((change for pattern, change in CHANGES.items() if fnmatchcase(key, pattern)), None)
        if found is None:
            effects.setdefault(_UNKNOWN, []).append(f"{key} = {_short(value)}")
        elif not any(type(value) is type(off) and value == off for off in found[0]):
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            said = f"the model is quantised: {method} ({key}): it" if method else f"{key} = {_short(value)}"
            changed = _ROUTING if found[1] is _MOE and architecture == MOE_ARCHITECTURE else found[1]
            effects.setdefault(f"would change {changed}", []).append(said)
    for effect, said_by in effects.items():
        yield f"{', '.join(said_by)} {effect}"


def _is_own(key: str, value: Any, architecture: str) -> bool:
    """Whether a switch says what ``architecture`` does anyway."""
    if key in ("use_qk_norm", "qk_norm", "qk_layernorm"):
        return value is (architecture in ("Qwen3ForCausalLM", MOE_ARCHITECTURE))
    if key == "qkv_bias":
        return value is (architecture == "Qwen2ForCausalLM")
    return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
