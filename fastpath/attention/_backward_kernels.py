# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The gradient kernels of attention over packed sequences: no atomics, every chain along ascending rows or keys.

Rows are as in the forward kernel: one query head of one token, those of a KV head together, token-major, counted from
the first token of the sequence. Chains along rows start at a multiple of the tile, so no tile size can change a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpath.attention._kernel import _EXPLICIT, _FLOAT32, KEYS
from fastpath.primitives import div_rn, exp2_nonpositive, narrow, pairs_tree, widen


@triton.jit
def product(a, b, total, DEPTH: tl.constexpr, STEP: tl.constexpr):
    """total + a @ b along ascending k, the target's way: a [M, DEPTH], b [DEPTH, N]."""
    if STEP == _EXPLICIT:
        index = tl.arange(0, DEPTH)
        for k in range(DEPTH):
            left = tl.sum(tl.where((index == k)[None, :], widen(a), 0.0), axis=1)  # one term: exact
            right = tl.sum(tl.where((index == k)[:, None], widen(b), 0.0), axis=0)
            total = tl.fma(left[:, None], right[None, :], total)
        return total
    else:
        if STEP == _FLOAT32:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def delta_kernel(grad_output, output, deltas, rows, D: tl.constexpr, ROWS: tl.constexpr):
    """deltas[row]: the tree of adjacent pairs over the products grad_output * output of a row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    place = row[:, None] * D + tl.arange(0, D)[None, :]
    a = widen(tl.load(grad_output + place, mask=inside[:, None], other=0.0))
    b = widen(tl.load(output + place, mask=inside[:, None], other=0.0))
    tl.store(deltas + row, pairs_tree(a * b, ROWS, D), mask=inside)


@triton.jit
def weights(q, k, dy, v, maxima, inverse, deltas, seen, scale, D: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Probabilities of ROWS rows and KEYS keys, and gradients of their scaled scores; float32 [ROWS, KEYS]."""
    zeros = tl.zeros([ROWS, KEYS], tl.float32)
    s = product(q, tl.trans(k), zeros, D, STEP) * scale
    p = tl.where(seen, exp2_nonpositive(s - maxima[:, None]), 0.0) * inverse[:, None]
    dp = product(dy, tl.trans(v), zeros, D, STEP)
    return p, p * (dp - deltas[:, None])


@triton.jit
def load_rows(
    q, grad_output, maxima, sums, deltas, first_query, queries, keys, head, start, q_stride,
    GROUP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows from row ``start``: queries, gradients, statistics, one past the last key each sees, and places."""
    row = start + tl.arange(0, ROWS)
    inside = row < queries * GROUP
    line = (first_query + row // GROUP).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    columns = tl.arange(0, D)[None, :]
    place = line * HEADS + query_head
    tile = tl.load(q + (line * q_stride + query_head * D)[:, None] + columns, mask=inside[:, None], other=0.0)
    dy = tl.load(grad_output + place[:, None] * D + columns, mask=inside[:, None], other=0.0)
    maximum = tl.load(maxima + place, mask=inside, other=0.0)
    inverse = div_rn(tl.full([ROWS], 1.0, tl.float32), tl.load(sums + place, mask=inside, other=1.0))
    delta = tl.load(deltas + place, mask=inside, other=0.0)
    end = tl.where(inside, keys - queries + row // GROUP + 1 if CAUSAL else keys, 0)
    return tile, dy, maximum, inverse, delta, end, place, inside


@triton.jit
def query_gradient_kernel(
    q, k, v, grad_output, maxima, sums, deltas, query_starts, key_starts, grad_q, q_stride, scale, factor,
    GROUP: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, CAUSAL: tl.constexpr,
    STEP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """grad_q of ROWS rows: a chain over their keys, times the factor of the scores."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_query = tl.load(query_starts + sequence)
    queries = tl.load(query_starts + sequence + 1) - first_query
    first_key = tl.load(key_starts + sequence)
    keys = tl.load(key_starts + sequence + 1) - first_key
    start = tl.program_id(0) * ROWS
    if start < queries * GROUP:
        tile, dy, maximum, inverse, delta, end, place, inside = load_rows(
            q, grad_output, maxima, sums, deltas, first_query, queries, keys, head, start, q_stride,
            GROUP, D, KV_HEADS * GROUP, CAUSAL, ROWS,
        )  # fmt: skip
        total = tl.zeros([ROWS, D], tl.float32)
        columns = tl.arange(0, D)[None, :]
        for block in range(0, tl.max(end, axis=0), KEYS):
            key = block + tl.arange(0, KEYS)
            rows = ((first_key + key).to(tl.int64) * (KV_HEADS * D) + head * D)[:, None] + columns
            k_tile = tl.load(k + rows, mask=(key < keys)[:, None], other=0.0)
            v_tile = tl.load(v + rows, mask=(key < keys)[:, None], other=0.0)
            seen = key[None, :] < end[:, None]
            _, ds = weights(tile, k_tile, dy, v_tile, maximum, inverse, delta, seen, scale, D, ROWS, STEP)
            total = product(narrow(ds, q.dtype.element_ty), k_tile, total, KEYS, STEP)
        result = narrow(total * factor, grad_q.dtype.element_ty)
        tl.store(grad_q + place[:, None] * D + columns, result, mask=inside[:, None])


@triton.jit
def key_gradient_kernel(
    q, k, v, grad_output, maxima, sums, deltas, query_starts, key_starts, grad_k, grad_v, q_stride, scale, factor,
    GROUP: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, CAUSAL: tl.constexpr,
    STEP: tl.constexpr, ROWS: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr,
):  # fmt: skip
    """grad_k and grad_v (or one of them) of a block of keys: chains over the rows that see it, ascending."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_query = tl.load(query_starts + sequence)
    queries = tl.load(query_starts + sequence + 1) - first_query
    first_key = tl.load(key_starts + sequence)
    keys = tl.load(key_starts + sequence + 1) - first_key
    block = tl.program_id(0) * KEYS
    if block < keys:
        key = block + tl.arange(0, KEYS)
        columns = tl.arange(0, D)[None, :]
        rows = ((first_key + key).to(tl.int64) * (KV_HEADS * D) + head * D)[:, None] + columns
        k_tile = tl.load(k + rows, mask=(key < keys)[:, None], other=0.0)
        v_tile = tl.load(v + rows, mask=(key < keys)[:, None], other=0.0)
        total_k = tl.zeros([KEYS, D], tl.float32)
        total_v = tl.zeros([KEYS, D], tl.float32)
        first_row = 0
        if CAUSAL:
            first_row = tl.maximum(block - (keys - queries), 0) * GROUP // ROWS * ROWS
        for start in range(first_row, queries * GROUP, ROWS):
            tile, dy, maximum, inverse, delta, end, _, _ = load_rows(
                q, grad_output, maxima, sums, deltas, first_query, queries, keys, head, start, q_stride,
                GROUP, D, KV_HEADS * GROUP, CAUSAL, ROWS,
            )  # fmt: skip
            seen = key[None, :] < end[:, None]
            p, ds = weights(tile, k_tile, dy, v_tile, maximum, inverse, delta, seen, scale, D, ROWS, STEP)
            if WANT_V:
                total_v = product(tl.trans(narrow(p, q.dtype.element_ty)), dy, total_v, ROWS, STEP)
            if WANT_K:
                total_k = product(tl.trans(narrow(ds, q.dtype.element_ty)), tile, total_k, ROWS, STEP)
        inside = (key < keys)[:, None]
        if WANT_K:
            tl.store(grad_k + rows, narrow(total_k * factor, grad_k.dtype.element_ty), mask=inside)
        if WANT_V:
            tl.store(grad_v + rows, narrow(total_v, grad_v.dtype.element_ty), mask=inside)
