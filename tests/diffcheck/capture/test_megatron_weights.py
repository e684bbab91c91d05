"""Weights go from HF to Megatron and back unchanged, for every architecture and tensor parallelism."""

from __future__ import annotations

import pytest

from diffcheck.capture.megatron.weights import (
    check_ranks,
    interleave_qkv,
    pad_vocabulary,
    parameters,
    split_qkv,
    to_hf,
    to_megatron,
)
from reference.models.config import ModelConfig
from reference.models.weights import weight_shapes

torch = pytest.importorskip("torch")


def config(architecture: str, **changes: object) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "architectures": [architecture],
            "num_hidden_layers": 2,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 6,
            "vocab_size": 101,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
            **changes,
        }
    )


CONFIGS = {
    "qwen3": config("Qwen3ForCausalLM"),
    "qwen3-tied": config("Qwen3ForCausalLM", tie_word_embeddings=True),
    "qwen2": config("Qwen2ForCausalLM", tie_word_embeddings=True),
    "llama": config("LlamaForCausalLM"),
    "llama-biases": config("LlamaForCausalLM", attention_bias=True),
    "one-group": config("LlamaForCausalLM", num_key_value_heads=1),
    "no-groups": config("LlamaForCausalLM", num_key_value_heads=8),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_exact(name: str, ranks: int) -> None:
    c = CONFIGS[name]
    if c.num_key_value_heads % ranks:
        pytest.skip("one key-value head cannot be split")
    weights = {key: torch.randn(shape) for key, shape in weight_shapes(c)}
    vocab = pad_vocabulary(c, 16, ranks)
    shards = [dict(to_megatron(weights, c, padded_vocab=vocab, ranks=ranks, rank=r)) for r in range(ranks)]
    assert list(shards[0]) == [p.megatron for p in parameters(c)]
    back = dict(to_hf(lambda key: [shard[key] for shard in shards], c))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], weights[key]) for key in weights)


def test_fused_projections_compute_what_the_separate_ones_do() -> None:
    """The layout of weights and of activations is the same permutation: checked in integers, so exactly."""
    c = CONFIGS["qwen3"]
    x = torch.randint(-4, 5, (7, c.hidden_size))
    q, k, v = (torch.randint(-4, 5, (size, c.hidden_size)) for size in (c.q_size, c.kv_size, c.kv_size))
    fused = x @ interleave_qkv([q, k, v], c).T
    for part, weight in zip(split_qkv(fused, c, axis=-1), (q, k, v), strict=True):
        assert torch.equal(part, x @ weight.T)
    assert torch.equal(interleave_qkv(split_qkv(fused, c, axis=-1), c, axis=-1), fused)


def test_rows_of_one_group_are_its_queries_then_key_then_value() -> None:
    """Megatron's own layout, written out for the first group: q heads 0 and 1, k head 0, v head 0."""
    c = CONFIGS["qwen3"]
    q, k, v = (torch.arange(size) + start for size, start in ((c.q_size, 0), (c.kv_size, 1000), (c.kv_size, 2000)))
    first = interleave_qkv([q, k, v], c)[: 4 * c.head_dim].tolist()
    assert first == [*range(12), *range(1000, 1006), *range(2000, 2006)]


def test_vocabulary_padding_is_zero_and_removed_again() -> None:
    c = CONFIGS["qwen3"]
    weights = {key: torch.ones(shape) for key, shape in weight_shapes(c)}
    assert pad_vocabulary(c, 128, 2) == 256
    last = dict(to_megatron(weights, c, padded_vocab=256, ranks=2, rank=1))["output_layer.weight"]
    assert last.shape == (128, c.hidden_size) and not last.any()


@pytest.mark.parametrize(
    ("ranks", "vocab", "field"), [(3, 102, "num_attention_heads"), (8, 128, "num_key_value_heads"), (1, 100, "smaller")]
)
def test_sizes_that_cannot_be_split_are_named(ranks: int, vocab: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        check_ranks(CONFIGS["qwen3"], vocab, ranks)
