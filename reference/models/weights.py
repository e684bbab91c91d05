"""Names and shapes of a decoder's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reference.checks import Float32Array, require_float32
from reference.models.config import ModelConfig


def weight_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every weight that the forward reads."""
    c = config
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    for n in range(c.num_hidden_layers):
        layer = f"model.layers.{n}"
        yield f"{layer}.input_layernorm.weight", (c.hidden_size,)
        yield f"{layer}.post_attention_layernorm.weight", (c.hidden_size,)
        for part, size in (("q", c.q_size), ("k", c.kv_size), ("v", c.kv_size)):
            yield f"{layer}.self_attn.{part}_proj.weight", (size, c.hidden_size)
            if c.qkv_bias:
                yield f"{layer}.self_attn.{part}_proj.bias", (size,)
        if c.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (c.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (c.head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (c.hidden_size, c.q_size)
        if c.o_bias:
            yield f"{layer}.self_attn.o_proj.bias", (c.hidden_size,)
        if c.is_sparse(n):
            yield f"{layer}.mlp.gate.weight", (c.num_experts, c.hidden_size)
            for e in range(c.num_experts):
                yield from _mlp(f"{layer}.mlp.experts.{e}", c.hidden_size, c.moe_intermediate_size)
        else:
            yield from _mlp(f"{layer}.mlp", c.hidden_size, c.intermediate_size)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tie_word_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)


def _mlp(name: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (width, hidden)
    yield f"{name}.up_proj.weight", (width, hidden)
    yield f"{name}.down_proj.weight", (hidden, width)


def check_weights(weights: Mapping[str, Float32Array], config: ModelConfig) -> None:
    """Check that every weight is there, in float32 and in shape. Further entries are ignored.

    Raises:
        ValueError: one is missing or of another shape.
        TypeError: one is not a native float32 array.
    """
    for name, shape in weight_shapes(config):
        if name not in weights:
            raise ValueError(f"weights: {name} {list(shape)} is missing")
        if require_float32(weights[name], f"weights[{name}]").shape != shape:
            raise ValueError(f"weights: {name} must have shape {list(shape)}, got {list(weights[name].shape)}")
