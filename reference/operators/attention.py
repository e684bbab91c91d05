"""Scaled dot-product attention over a sequence's keys in blocks (Milakov and Gimelshein 2018; Dao et al. 2022).

One function serves prefill, chunked prefill, decode and packed sequences: it is called per sequence with the positions
of the queries and a reader of keys and values (:class:`reference.operators.kv_cache.KeyValues`), dense or paged.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.operators._arguments import float_array, index_array, positive
from reference.operators._attention_contract import AttentionContract
from reference.operators._online_softmax import accumulate, attend, finish
from reference.operators.kv_cache import KeyValues

__all__ = ["AttentionContract", "attention"]


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
