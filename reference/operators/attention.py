"""Scaled dot-product attention over a sequence's keys in blocks (Milakov and Gimelshein 2018; Dao et al. 2022).

One function serves prefill, chunked prefill, decode and packed sequences: it is called per sequence with the positions
of the queries and a reader of keys and values (:class:`reference.operators.kv_cache.KeyValues`), dense or paged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, Value, choice, format_choice
from reference.operators._arguments import float_array, index_array, positive
from reference.operators._numerics import (
    ATTENTION_EXPS,
    BLOCK_ORDERS,
    K_ORDERS,
    UNIT_NAMES,
    UNIT_WORDS,
    require_unit,
    row_order_words,
    unit_for,
)
from reference.operators._online_softmax import accumulate, attend, finish
from reference.operators.kv_cache import KeyValues


@dataclass(frozen=True)
class Domain(Group):
    input: str = choice(
        ("bfloat16", "float16", "float32"),
        "multiplies {value} queries and keys",
        equivalent="operands outside the format are refused; only a matrix unit that treats formats apart can differ",
        given=True,
    )
    mask: str = choice(
        ("causal", "full"),
        {"causal": "lets a query see keys up to its own position", "full": "lets a query see every key"},
        given=True,
    )
    block_origin: str = choice(
        ("sequence", "packed_buffer"),
        {
            "sequence": "counts key blocks from position 0 of the sequence",
            "packed_buffer": "counts key blocks from the start of the packed buffer",
        },
        equivalent="a sequence at a multiple of the block size, or alone, has both origins in common",
        given=True,
    )


@dataclass(frozen=True)
class Partition(Group):
    block: int = choice(
        (64, 16, 32, 128, 256, 0),
        {0: "takes all keys at once"} | {n: f"takes keys in blocks of {n}" for n in (64, 16, 32, 128, 256)},
    )
    split: str = choice(
        ("none", "fixed-128", "fixed-256", "fixed-512", "equal-2", "equal-4", "equal-8"),
        {
            "none": "goes through all blocks in one pass",
            **{
                f"fixed-{n}": f"closes a partial result every {n} keys and merges them in order"
                for n in (128, 256, 512)
            },
            **{f"equal-{n}": f"splits the visible blocks into {n} parts and merges them in order" for n in (2, 4, 8)},
        },
    )


@dataclass(frozen=True)
class Order(Group):
    keys: str = choice(
        ("ascending", "descending"),
        {"ascending": "visits blocks upwards", "descending": "visits blocks downwards, the newest keys first"},
    )
    k: str = choice(("ascending", "pairs_odd_first"), K_ORDERS)
    row_sum: str = choice(BLOCK_ORDERS, row_order_words("adds a block's probabilities"))
    accumulate: str = choice(
        ("chain", "add", "fma"),
        {
            "chain": "rescales the accumulator and continues its chain through the block's values",
            "add": "sums the block from zero, and adds it to the rescaled accumulator",
            "fma": "sums the block from zero, and fuses the rescaling with the add",
        },
    )
    normalise: str = choice(
        ("after_values", "before_values"),
        {
            "after_values": "divides by the row sum at the end",
            "before_values": "divides probabilities by the row sum before it weighs the values",
        },
    )
    sink: str = choice(
        ("first", "last"),
        {"first": "starts the softmax from the sink", "last": "adds the sink after the last key"},
        equivalent="without sinks there is nothing to place",
    )


@dataclass(frozen=True)
class Rounding(Group):
    query: str = format_choice("float32", "does not round scaled queries", "rounds scaled queries to {value}")
    products: str = format_choice(
        "float32", "keeps products of queries and keys in float32", "rounds products of queries and keys to {value}"
    )
    scores: str = format_choice(
        "float32", "keeps scaled scores in float32", "rounds scaled scores to {value} before the softmax"
    )
    row_sum: str = format_choice("float32", "sums unrounded probabilities", "sums probabilities rounded to {value}")
    probabilities: str = format_choice(
        "bfloat16",
        "weighs the values with float32 probabilities",
        "rounds probabilities to {value} before it weighs the values",
    )
    output: str = format_choice("bfloat16", "rounds the output to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    unit: str = choice(UNIT_NAMES, UNIT_WORDS)
    scale: str = choice(
        ("folded", "separate", "query"),
        {
            "folded": "scales scores by one constant, into which log2(e) is folded for base 2",
            "separate": "scales scores by 1/sqrt(d) first and, for base 2, by log2(e) second",
            "query": "scales queries by 1/sqrt(d) before the product and, for base 2, scores by log2(e) after it",
        },
    )
    exp: str = choice(tuple(ATTENTION_EXPS), "computes the softmax's exponential as {value}")
    update: str = choice(
        ("fma", "mul_add"),
        {"fma": "updates the row sum by FMA", "mul_add": "rescales the row sum, then adds to it"},
    )
    finish: str = choice(
        ("divide", "reciprocal"),
        {"divide": "divides by the row sum", "reciprocal": "multiplies by the reciprocal of the row sum"},
    )


@dataclass(frozen=True)
class AttentionContract(Contract):
    """Per query row and key block, with c = log2(e)/sqrt(d) or 1/sqrt(d):
      s = c * dot(q, k), masked -> -inf;  m' = max(m, max(s));  a = exp(m - m');  p = exp(s - m')
      l = l * a + sum(p);  acc = acc * a + p @ v
    and at the end  y = acc / l + 0  (never -0). A masked key takes no part."""

    operator: ClassVar[str] = "attention"
    domain: Domain = Domain()
    partition: Partition = Partition()
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        def require(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"attention: {what}")

        whole = self.partition.block == 0
        require(
            not whole or self.partition.split == "none", "partition.split must be 'none' where partition.block is 0"
        )
        require(
            not whole or self.order.keys == "ascending", "order.keys must be 'ascending' where partition.block is 0"
        )
        require(
            not whole or self.order.accumulate == "chain", "order.accumulate must be 'chain' where partition.block is 0"
        )
        require(
            not whole or self.primitives.update == "fma", "primitives.update must be 'fma' where partition.block is 0"
        )
        require(
            not whole or self.domain.block_origin == "sequence",
            "domain.block_origin must be 'sequence' where partition.block is 0",
        )
        require(
            whole or self.order.normalise == "after_values", "order.normalise 'before_values' needs partition.block 0"
        )
        require(
            self.partition.split == "none" or self.order.keys == "ascending",
            "partition.split needs order.keys 'ascending'",
        )
        require(
            self.primitives.scale == "query" or self.rounding.query == "float32",
            "rounding.query must be 'float32' unless primitives.scale is 'query'",
        )
        require(
            self.order.normalise == "after_values" or self.order.sink == "first",
            "order.sink must be 'first' where order.normalise is 'before_values'",
        )
        base, _ = ATTENTION_EXPS[self.primitives.exp]
        require(
            base == "2" or self.primitives.scale != "separate",
            "primitives.scale 'separate' needs an exponential of base 2",
        )
        split_size = int(self.partition.split.removeprefix("fixed-")) if self.partition.split.startswith("fixed") else 0
        require(
            split_size % (self.partition.block or 1) == 0,
            "a fixed partition.split must be a multiple of partition.block",
        )
        require_unit(self.primitives.unit, self.domain.input, self.operator)

    def dtype_changes(self, dtype: str) -> dict[str, Value]:
        return super().dtype_changes(dtype) | {"primitives.unit": unit_for(self.primitives.unit, dtype)}


def attention(
    q: Float32Array,
    positions: NDArray[Any],
    kv: KeyValues,
    contract: AttentionContract,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Float32Array | None = None,
    packed_offset: int = 0,
) -> Float32Array:
    """Attention of some tokens of one sequence over the sequence's keys.

    Args:
        q: float32, [tokens, heads, head_dim].
        positions: integers, [tokens]: position of each query in its sequence, below ``kv.length``.
        kv: keys and values of the sequence; its heads divide ``heads`` (grouped-query attention).
        scale: factor of the scores; None is 1/sqrt(head_dim).
        window: a query sees this many newest keys, its own included; None sees all. Only with a causal mask.
        sinks: float32, [heads]: a score per head that takes probability and has no value.
        packed_offset: where the sequence starts in a packed buffer (only some contracts look at it).

    Returns:
        float32, [tokens, heads, head_dim].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; a position without key; a window below 1;
            heads that do not divide; a query that sees no key.
    """
    q = float_array(q, "q", "tokens, heads, head_dim")
    tokens, heads, head_dim = q.shape
    where = index_array(positions, "positions", "tokens", kv.length, "the sequence's keys")
    if where.size != tokens:
        raise ValueError(f"positions: expected {tokens}, one per query, got {where.size}")
    if window is not None and (window < 1 or contract.domain.mask != "causal"):
        raise ValueError(
            f"window: needs a causal mask and at least 1 key, got {window} with mask {contract.domain.mask}"
        )
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    positive(scale, "scale")
    if tokens == 0:
        return q
    if kv.length == 0:
        raise ValueError("q: a query sees no key, since the sequence is empty")
    _, kv_heads, key_dim = kv.read(0, 1)[0].shape
    if key_dim != head_dim:
        raise ValueError(f"q: head_dim {head_dim} differs from the keys' {key_dim}")
    if heads % kv_heads:
        raise ValueError(f"q: {heads} heads are not a multiple of the {kv_heads} KV heads")
    if sinks is not None:
        sinks = float_array(sinks, "sinks", f"heads={heads}")
    first, last = _visible_keys(where, kv.length, contract.domain.mask, window)
    rows = _to_rows(q, kv_heads)
    sink = None if sinks is None else np.tile(sinks.reshape(kv_heads, -1), tokens)
    return _from_rows(attend(rows, first, last, kv, scale, sink, packed_offset, contract), tokens)


class AttentionResult(NamedTuple):
    """What the gradient needs: the output [tokens, heads, head_dim]; maximum of the scaled scores and row sum of the
    exponentials, [tokens, heads]."""

    output: Float32Array
    maximum: Float32Array
    total: Float32Array


def attention_result(
    q: Float32Array, positions: NDArray[Any], kv: KeyValues, contract: AttentionContract, *, scale: float | None = None
) -> AttentionResult:
    """:func:`attention` without window and sinks, with the statistics of its softmax. Arguments are not checked."""
    tokens, _, head_dim = q.shape
    kv_heads = kv.read(0, 1)[0].shape[1]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    first, last = _visible_keys(np.asarray(positions, np.int64), kv.length, contract.domain.mask, None)
    state = accumulate(_to_rows(q, kv_heads), first, last, kv, scale, None, 0, contract)
    statistics = (_from_rows(part[..., None], tokens)[..., 0] for part in (state.maximum, state.total))
    return AttentionResult(_from_rows(finish(state, contract), tokens), *statistics)


def _visible_keys(
    positions: NDArray[np.int64], length: int, mask: str, window: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and one past the last key that each token sees."""
    if mask == "full":
        return np.zeros_like(positions), np.full_like(positions, length)
    first = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
    return first, positions + 1


def _to_rows(q: Float32Array, kv_heads: int) -> Float32Array:
    """[tokens, heads, head_dim] to [KV heads, tokens * group, head_dim]: the rows that share a KV head, token-major."""
    tokens, heads, head_dim = q.shape
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    return np.ascontiguousarray(grouped.transpose(1, 0, 2, 3)).reshape(kv_heads, -1, head_dim)


def _from_rows(rows: Float32Array, tokens: int) -> Float32Array:
    """The inverse of :func:`_to_rows`."""
    kv_heads, _, head_dim = rows.shape
    grouped = rows.reshape(kv_heads, tokens, -1, head_dim)
    return np.ascontiguousarray(grouped.transpose(1, 0, 2, 3)).reshape(tokens, -1, head_dim)
