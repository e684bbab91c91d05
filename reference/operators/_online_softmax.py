"""The loop of attention over key blocks: scores, online softmax, weighted values, for rows that share a KV head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.operators._attention_contract import AttentionContract
from reference.operators._numerics import ATTENTION_EXPS, k_order, narrow, quiet, row_sum, unit_dot
from reference.operators.kv_cache import KeyValues

LOG2E = float.fromhex("0x1.71547652b82fep+0")
ZERO, ONE, NEVER = np.float32(0), np.float32(1), np.float32(-np.inf)


@dataclass
class _State:
    """Softmax in progress: maximum and row sum [KV heads, rows], weighted values [KV heads, rows, head_dim]."""

    maximum: Float32Array
    total: Float32Array
    values: Float32Array

    def at(self, rows: Any) -> _State:
        return _State(self.maximum[:, rows], self.total[:, rows], self.values[:, rows])

    def put(self, rows: Any, new: _State) -> None:
        self.maximum[:, rows], self.total[:, rows], self.values[:, rows] = new.maximum, new.total, new.values


def _empty(shape: tuple[int, ...]) -> _State:
    return _State(np.full(shape[:2], NEVER), np.zeros(shape[:2], np.float32), np.zeros(shape, np.float32))


@quiet()
def attend(
    q: Float32Array,
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    kv: KeyValues,
    scale: float,
    sink: Float32Array | None,
    packed_offset: int,
    contract: AttentionContract,
) -> Float32Array:
    """Attention of rows [KV heads, tokens * group, head_dim]; token t sees keys [first[t], last[t]).

    ``sink`` is [KV heads, rows] or None. Arguments are not checked.
    """
    return finish(accumulate(q, first, last, kv, scale, sink, packed_offset, contract), contract)


@quiet()
def accumulate(
    q: Float32Array,
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    kv: KeyValues,
    scale: float,
    sink: Float32Array | None,
    packed_offset: int,
    contract: AttentionContract,
) -> _State:
    """The softmax and weighted values after the last key, arguments as `attend`."""
    if contract.primitives.scale == "query":
        q = narrow(q * np.float32(scale), contract.rounding.query)
    if sink is not None and ATTENTION_EXPS[contract.primitives.exp][0] == "2":
        sink = sink * np.float32(LOG2E)
    state, closed = _empty(q.shape), _empty(q.shape)
    if sink is not None and contract.order.sink == "first":
        state.maximum[...], state.total[...] = sink, ONE
    group = q.shape[1] // first.size
    block = contract.partition.block or kv.length
    shift = packed_offset % block if contract.domain.block_origin == "packed_buffer" else 0
    for start in _block_starts(int(first.min()), int(last.max()), shift, block, contract.order.keys):
        tokens = np.flatnonzero((first < start + block) & (last > start))
        if not tokens.size:
            continue
        closing = tokens[_opens_split(start + shift, block, first[tokens] + shift, last[tokens] + shift, contract)]
        if closing.size:
            _close(state, closed, _rows(closing, group), contract)
        rows = slice(None) if tokens.size == first.size else _rows(tokens, group)
        stop = min(start + block, int(last[tokens].max()))
        keys, values = _read(kv, start, stop)
        key = np.arange(start, stop)
        seen = np.repeat((key >= first[tokens, None]) & (key < last[tokens, None]), group, axis=0)
        state.put(rows, _visit(state.at(rows), q[:, rows], keys, values, seen, block, scale, contract))
    if contract.partition.split != "none":
        _close(state, closed, slice(None), contract)
        state = closed
    if sink is not None and contract.order.sink == "last":
        state = _merge(state, _State(sink, np.ones_like(sink), np.zeros_like(state.values)), contract)
    return state


@quiet()
def finish(state: _State, contract: AttentionContract) -> Float32Array:
    """The output of a finished softmax, rounded: [KV heads, rows, head_dim]."""
    if contract.order.normalise == "before_values":
        return narrow(state.values + ZERO, contract.rounding.output)
    return narrow(_divide(state.values, state.total, contract) + ZERO, contract.rounding.output)


def _block_starts(first: int, last: int, shift: int, block: int, order: str) -> Iterable[int]:
    """First key (relative to the sequence) of every block that holds a key in [first, last)."""
    low, high = (first + shift) // block, -(-(last + shift) // block)
    starts = range(low * block - shift, high * block - shift, block)
    return starts if order == "ascending" else reversed(starts)


def _rows(tokens: NDArray[np.int64], group: int) -> NDArray[np.int64]:
    return (tokens[:, None] * group + np.arange(group)).reshape(-1)


def _opens_split(
    start: int, block: int, first: NDArray[np.int64], last: NDArray[np.int64], contract: AttentionContract
) -> NDArray[np.bool_]:
    """Which tokens begin a new partial result at the block at ``start`` (all counted from the block grid's origin)."""
    kind, _, size = contract.partition.split.partition("-")
    first_block, end_block, here = first // block, -(-last // block), start // block
    if kind == "none":
        return np.zeros(first.shape, np.bool_)
    if kind == "fixed":
        starts: NDArray[np.bool_] = (here > first_block) & (start % int(size) == 0)
        return starts
    per_split = -(-(end_block - first_block) // int(size))
    starts = (here > first_block) & ((here - first_block) % per_split == 0)
    return starts


def _read(kv: KeyValues, start: int, stop: int) -> tuple[Float32Array, Float32Array]:
    """Keys [KV heads, head_dim, n] and values [KV heads, n, head_dim] of tokens [start, stop), zeros before token 0."""
    keys, values = kv.read(max(start, 0), stop)
    if start < 0:
        front = ((-start, 0), (0, 0), (0, 0))
        keys, values = np.pad(keys, front), np.pad(values, front)
    return keys.transpose(1, 2, 0), values.transpose(1, 0, 2)


def _visit(
    state: _State,
    q: Float32Array,
    keys: Float32Array,
    values: Float32Array,
    seen: NDArray[np.bool_],
    block: int,
    scale: float,
    contract: AttentionContract,
) -> _State:
    """The state after one key block."""
    primitives, rounding = contract.primitives, contract.rounding
    exponential = ATTENTION_EXPS[primitives.exp][1]
    operands = contract.domain.input if rounding.query in ("float32", contract.domain.input) else "float32"
    if primitives.scale == "query" and rounding.query == "float32":
        operands = "float32"
    products = np.stack(
        [_chain(rows, k, None, operands, ("q", "keys"), contract) for rows, k in zip(q, keys, strict=True)]
    )
    scores = np.where(seen, _scale_scores(products, scale, contract), NEVER)
    maximum = np.maximum(state.maximum, scores.max(axis=-1))
    alpha = exponential(_difference(state.maximum, maximum))
    p = np.where(seen, exponential(scores - maximum[..., None]), ZERO)
    # a block at the end of the sequence has the same tree as a full one: absent keys are zeros
    whole = np.pad(p, ((0, 0), (0, 0), (0, block - p.shape[-1])))
    block_sum = row_sum(narrow(whole, rounding.row_sum), contract.order.row_sum)
    if primitives.update == "fma":
        total = fused_multiply_add(state.total, alpha, block_sum)
    else:
        total = state.total * alpha + block_sum
    if contract.order.normalise == "before_values":
        p = _divide(p, total, contract)
    p = narrow(p, rounding.probabilities)
    return _State(maximum, total, _weigh(p, values, state.values, alpha[..., None], seen, contract))


def _scale_scores(s: Float32Array, scale: float, contract: AttentionContract) -> Float32Array:
    """Products of queries and keys, scaled for the exponential's base."""
    base, how = ATTENTION_EXPS[contract.primitives.exp][0], contract.primitives.scale
    s = narrow(s, contract.rounding.products)
    if how == "folded":
        return narrow(s * np.float32(scale * LOG2E if base == "2" else scale), contract.rounding.scores)
    if how == "separate":
        s = s * np.float32(scale)
    s = narrow(s, contract.rounding.scores)
    return s * np.float32(LOG2E) if base == "2" else s


def _weigh(
    p: Float32Array,
    values: Float32Array,
    accumulator: Float32Array,
    alpha: Float32Array,
    seen: NDArray[np.bool_],
    contract: AttentionContract,
) -> Float32Array:
    """The rescaled accumulator plus p @ values."""
    order = contract.order.accumulate
    start = accumulator * alpha if order == "chain" else np.zeros_like(accumulator)
    product = np.stack([_product(*head, seen, contract) for head in zip(p, values, start, strict=True)])
    if order == "chain":
        return product
    return fused_multiply_add(accumulator, alpha, product) if order == "fma" else accumulator * alpha + product


def _product(
    p: Float32Array, values: Float32Array, start: Float32Array, seen: NDArray[np.bool_], contract: AttentionContract
) -> Float32Array:
    """start + p @ values, where a masked key takes no part even if its value is Inf or NaN."""
    fmt, names = contract.domain.input, ("probabilities", "values")
    operands = fmt if contract.rounding.probabilities == fmt else "float32"
    if np.isfinite(values).all():
        return _chain(p, values, start, operands, names, contract)
    rows = []
    for i in range(p.shape[0]):
        visible = np.where(seen[i, :, None], values, ZERO)
        rows.append(_chain(p[i : i + 1], visible, start[i : i + 1], operands, names, contract))
    return np.concatenate(rows)


def _chain(
    a: Float32Array,
    b: Float32Array,
    start: Float32Array | None,
    fmt: str,
    names: tuple[str, str],
    contract: AttentionContract,
) -> Float32Array:
    """start + a @ b on the contract's unit, in the contract's order."""
    order = k_order(a.shape[1], contract.order.k)
    return unit_dot(a[:, order], b[order], start, contract.primitives.unit, fmt, names)


def _divide(x: Float32Array, total: Float32Array, contract: AttentionContract) -> Float32Array:
    total = total[..., None]
    return x / total if contract.primitives.finish == "divide" else x * (ONE / total)


def _difference(a: Float32Array, b: Float32Array) -> Float32Array:
    """a - b, and 0 where they are equal, infinities included."""
    return np.where(a == b, ZERO, a - b)


def _merge(a: _State, b: _State, contract: AttentionContract) -> _State:
    """Two partial results as one, the earlier keys first."""
    exponential = ATTENTION_EXPS[contract.primitives.exp][1]
    maximum = np.maximum(a.maximum, b.maximum)
    scale_a, scale_b = exponential(_difference(a.maximum, maximum)), exponential(_difference(b.maximum, maximum))
    total = fused_multiply_add(a.total, scale_a, b.total * scale_b)
    values = fused_multiply_add(a.values, scale_a[..., None], b.values * scale_b[..., None])
    return _State(maximum, total, values)


def _close(state: _State, closed: _State, rows: Any, contract: AttentionContract) -> None:
    """Merge the open partial results of ``rows`` into the closed ones, and open empty ones."""
    closed.put(rows, _merge(closed.at(rows), state.at(rows), contract))
    opened = state.at(rows)
    state.put(rows, _empty(opened.values.shape))
