"""Weights of a decoder between Hugging Face and Megatron-core, both directions, for any tensor parallelism.

Megatron-core keeps q, k and v in one matrix, interleaved per key-value group as [q of the group; k; v], and gate and up
in one matrix whose halves are sharded apart, so that every rank holds [its gate; its up]. Column-parallel weights are
split by rows, row-parallel ones by columns, the vocabulary by rows after padding it with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reference.models.config import ModelConfig

Tensor = Any
#: How one Megatron parameter is laid out on the ranks.
Layout = Literal["replicated", "row", "vocabulary", "qkv", "gate_up"]
#: Megatron name -> that parameter on every rank, in rank order.
Fetch = Callable[[str], Sequence[Tensor]]


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter and the HF weights it is made of (q, k, v or gate, up, or a single one)."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """All parameters of the local layer specification, in the order of the forward pass."""
    yield Parameter("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")
    for n in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{n}", f"model.layers.{n}"
        attention = f"{theirs}.self_attn"
        yield Parameter(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",), "replicated")
        kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
        for kind in kinds:
            qkv = tuple(f"{attention}.{x}_proj.{kind}" for x in "qkv")
            yield Parameter(f"{ours}.self_attention.linear_qkv.{kind}", qkv, "qkv")
        if config.qk_norm:
            for x in "qk":
                name = f"{ours}.self_attention.{x}_layernorm.weight"
                yield Parameter(name, (f"{attention}.{x}_norm.weight",), "replicated")
        yield Parameter(f"{ours}.self_attention.linear_proj.weight", (f"{attention}.o_proj.weight",), "row")
        if config.o_bias:
            yield Parameter(f"{ours}.self_attention.linear_proj.bias", (f"{attention}.o_proj.bias",), "replicated")
        norm = f"{theirs}.post_attention_layernorm.weight"
        yield Parameter(f"{ours}.pre_mlp_layernorm.weight", (norm,), "replicated")
        if config.is_sparse(n):
            yield from _experts(f"{ours}.mlp", f"{theirs}.mlp", config.num_experts)
            continue
        gate_up = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        yield Parameter(f"{ours}.mlp.linear_fc1.weight", gate_up, "gate_up")
        yield Parameter(f"{ours}.mlp.linear_fc2.weight", (f"{theirs}.mlp.down_proj.weight",), "row")
    yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated")
    if not config.tie_word_embeddings:
        yield Parameter("output_layer.weight", ("lm_head.weight",), "vocabulary")


def _experts(ours: str, theirs: str, number: int) -> Iterator[Parameter]:
    yield Parameter(f"{ours}.router.weight", (f"{theirs}.gate.weight",), "replicated")
    for e in range(number):
        own, hf = f"{ours}.experts.local_experts.{e}", f"{theirs}.experts.{e}"
        gate_up = (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")
        yield Parameter(f"{own}.linear_fc1.weight", gate_up, "gate_up")
        yield Parameter(f"{own}.linear_fc2.weight", (f"{hf}.down_proj.weight",), "row")


def to_megatron(
    weights: Mapping[str, Tensor], config: ModelConfig, *, padded_vocab: int, ranks: int = 1, rank: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """(Megatron name, this rank's parameter) of HF ``weights``.

    Args:
        padded_vocab: rows of the embedding and the head over all ranks; the added ones are zero.

    Raises:
        KeyError: a weight is missing.
        ValueError: a size is not divisible by ``ranks``; see `check_ranks`.
    """
    check_ranks(config, padded_vocab, ranks)
    for parameter in parameters(config):
        parts = [weights[name] for name in parameter.hf]
        yield parameter.megatron, _shard(parameter.layout, parts, config, padded_vocab, ranks, rank)


def to_hf(fetch: Fetch, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole weight) of a Megatron model, one parameter at a time, padding removed.

    Args:
        fetch: gives one parameter's shards of all ranks; under tensor parallelism every rank must iterate alike.
    """
    for parameter in parameters(config):
        shards = fetch(parameter.megatron)
        yield from zip(parameter.hf, _join(parameter.layout, shards, config), strict=True)


def interleave_qkv(parts: Sequence[Tensor], config: ModelConfig, axis: int = 0) -> Tensor:
    """q, k, v in HF order -> one tensor, [q; k; v] of each group in turn along ``axis``. A rank's groups will do."""
    import torch

    axis %= parts[0].ndim
    groups = parts[1].shape[axis] // config.head_dim
    split = [part.unflatten(axis, (groups, -1)) for part in parts]
    return torch.cat(split, dim=axis + 1).flatten(axis, axis + 1)


def split_qkv(mixed: Tensor, config: ModelConfig, axis: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of `interleave_qkv`."""
    axis %= mixed.ndim
    heads = config.num_attention_heads // config.num_key_value_heads
    sizes = [heads * config.head_dim, config.head_dim, config.head_dim]
    q, k, v = mixed.unflatten(axis, (-1, sum(sizes))).split(sizes, dim=axis + 1)
    return q.flatten(axis, axis + 1), k.flatten(axis, axis + 1), v.flatten(axis, axis + 1)


def check_ranks(config: ModelConfig, padded_vocab: int, ranks: int) -> None:
    """Raises:
    ValueError: heads, MLP width or vocabulary cannot be split evenly over ``ranks``; the field is named.
    """
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "padded vocabulary": padded_vocab,
    }
    for name, size in sizes.items():
        if size % ranks:
            raise ValueError(f"{name} = {size} is not divisible by tensor parallelism {ranks}")
    if padded_vocab < config.vocab_size:
        raise ValueError(f"padded vocabulary = {padded_vocab} is smaller than vocab_size = {config.vocab_size}")


def pad_vocabulary(config: ModelConfig, multiple: int, ranks: int) -> int:
    """Rows of Megatron's embedding: the next multiple of ``multiple * ranks`` (its make-vocab-size-divisible-by)."""
    step = multiple * ranks
    return -(-config.vocab_size // step) * step


def _shard(
    layout: Layout, parts: list[Tensor], config: ModelConfig, padded_vocab: int, ranks: int, rank: int
) -> Tensor:
    import torch

    whole = parts[0]
    if layout == "replicated":
        return whole
    if layout == "row":
        return whole.chunk(ranks, dim=1)[rank]
    if layout == "gate_up":
        return torch.cat([part.chunk(ranks, dim=0)[rank] for part in parts])
    if layout == "qkv":
        return interleave_qkv([part.chunk(ranks, dim=0)[rank] for part in parts], config)
    padding = whole.new_zeros(padded_vocab - whole.shape[0], *whole.shape[1:])
    return torch.cat([whole, padding]).chunk(ranks, dim=0)[rank]


def _join(layout: Layout, shards: Sequence[Tensor], config: ModelConfig) -> tuple[Tensor, ...]:
    import torch

    if layout == "replicated":
        return (shards[0],)
    if layout == "row":
        return (torch.cat(list(shards), dim=1),)
    if layout == "vocabulary":
        return (torch.cat(list(shards))[: config.vocab_size],)
    split = [shard.chunk(2, dim=0) if layout == "gate_up" else split_qkv(shard, config) for shard in shards]
    return tuple(torch.cat(list(parts)) for parts in zip(*split, strict=True))
