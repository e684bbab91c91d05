"""Every key of a config.json is understood, known to be inert, or stops the run by name with what it would change."""

from __future__ import annotations

from typing import Any

import pytest

from reference.models.config import ModelConfig, UnsupportedModelError, rope_of

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_experts": 8, "moe_intermediate_size": 64},
            "num_experts = 8, moe_intermediate_size = 64 would change .*MLP",
        ),
        ({"num_local_experts": 8}, "num_local_experts = 8 would change the MLP"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the model is quantised: fp8"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 would change .*capped"),
        ({"residual_multiplier": 0.22}, "residual_multiplier = 0.22 would change the size"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar = 256 would change the scale of attention"),
        ({"use_qk_norm": False}, "use_qk_norm = False would change queries and keys"),
        ({**LLAMA, "use_qk_norm": True}, "use_qk_norm = True would change queries and keys"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 would change attention in training mode"),
        ({"is_causal": False}, "is_causal = False would change which keys"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"bias": True}, "bias = True would change the projections"),
        ({"a_new_switch": False}, "a_new_switch = False is not known here"),
        ({"model_type": "llama"}, "model_type 'llama' contradicts architecture Qwen3ForCausalLM"),
        ({**LLAMA, "sliding_window": 8}, "sliding_window = 8 would change which keys .* vLLM applies it to a Llama"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "contradict each other .*'default' against 'yarn'"),
        # vLLM and transformers would differ in theta alone.
        ({"rope_scaling": {"rope_type": "default"}}, "contradict each other .rope_theta 1000000.0 against 10000.0"),
        ({"rope_theta": 5e5}, "rope_theta 500000.0 contradicts rope_parameters.rope_theta 1000000.0"),
        ({"rope_parameters": {"rope_type": "default", "type": "linear"}}, "rope_type and type contradict"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "contradicts use_sliding_window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention. is not supported"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "layer_types = .*vLLM applies it"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type .dynamic. is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type .yarn. needs factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "rope_type .default. has no factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}}, "rope_parameters.mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "by layer type"),
    ],
)
def test_a_key_that_may_change_the_forward_stops_the_run_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        ModelConfig.from_dict({**QWEN3, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"residual_multiplier": 1.0, "use_mrope": False, "use_qk_norm": True, "eos_token_id": [1, 2], "foo": None},
        {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 2},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default", "rope_theta": 1e6}},
    ],
)
def test_a_key_that_changes_nothing_is_taken(changes: dict[str, Any]) -> None:
    assert ModelConfig.from_dict({**QWEN3, **changes}) == ModelConfig.from_dict(QWEN3)


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
def test_every_key_that_transformers_writes_is_known_and_read_as_it_reads_it(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(architectures=[name.replace("Config", "ForCausalLM")])
    written = config.to_dict()
    read = ModelConfig.from_dict(written)
    assert read.head_dim == getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    assert read.num_key_value_heads == config.num_key_value_heads
    for key in ("head_dim", "num_key_value_heads", "tie_word_embeddings", "rope_parameters"):
        # Absent keys mean what transformers takes them for.
        assert ModelConfig.from_dict({k: v for k, v in written.items() if k != key}) == read


def test_both_spellings_of_rope_are_read() -> None:
    old = {k: v for k, v in QWEN3.items() if k != "rope_parameters"} | {"rope_theta": 5e5}
    assert rope_of(old) == {"rope_type": "default", "rope_theta": 5e5}
    assert rope_of({**old, "rope_scaling": {"type": "linear", "factor": 2.0}}) == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 5e5,
    }


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64 would change .*shared experts"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1 would change .*shared experts"),
        ({"n_group": 4, "topk_group": 2}, "n_group = 4, topk_group = 2 would change which experts"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5 would change which experts"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' would change which experts"),
        ({"router_bias": True}, "router_bias = True would change which experts"),
        ({"num_local_experts": 16}, "num_experts and num_local_experts contradict each other"),
        ({"num_experts": None}, "num_experts and num_local_experts are both missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ({"num_experts": 0}, "num_experts 0 is not from 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob 1 must be true or false"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers .2. are not layers from 0 to 1"),
        ({"mlp_only_layers": [0, 1]}, "leave no layer with experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0 must be"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM is not supported .its shared experts"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "not supported .its shared experts, group routing"),
    ],
)
def test_what_a_mixture_of_experts_may_not_say_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        ModelConfig.from_dict({**QWEN3, **MOE, **changes})


def test_a_mixture_of_experts_is_read_as_both_releases_of_transformers_write_it() -> None:
    old = ModelConfig.from_dict({**QWEN3, **MOE, "decoder_sparse_step": 2, "router_aux_loss_coef": 0.001})
    new = {k: v for k, v in MOE.items() if k != "num_experts"} | {"num_local_experts": 8}
    assert old.dense_layers == (0,) and not old.is_sparse(0) and old.is_sparse(1)
    assert old == ModelConfig.from_dict({**QWEN3, **new, "mlp_only_layers": [0], "output_router_logits": True})
