# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernel of attention: a tile of query rows visits the blocks of 64 keys of its sequence in ascending order.

A row is one query head of one token; rows that share a KV head lie together, token-major. No row depends on another, so
tiles, chunks, packing and pages cannot change a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpath.primitives import (
    TO_INTEGER,
    bits,
    div_rn,
    exp2_nonpositive,
    exp2_polynomial,
    from_bits,
    narrow,
    pairs_tree,
    widen,
)

#: Ways to make one step along K: the matrix unit, the compiler's float32 product, one explicit FMA per k.
MATRIX, FLOAT32, EXPLICIT = 0, 1, 2
_FLOAT32, _EXPLICIT = tl.constexpr(FLOAT32), tl.constexpr(EXPLICIT)
#: Keys of one block: the contract's.
KEYS = tl.constexpr(64)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def place_of(table, key, length, STRIDE: tl.constexpr, PAGE: tl.constexpr):
    """Offset of a key (one, or [KEYS]) of a sequence; ``table``: its block table, or (PAGE 0) its first row."""
    if PAGE == 0:
        return (table + key).to(tl.int64) * STRIDE
    else:
        page = tl.load(table + key // PAGE, mask=key < length, other=0).to(tl.int64)
        return (page * PAGE + key % PAGE) * STRIDE


@triton.jit
def fetch_block(
    base, boxes, head, table, start, length,
    D: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """As `load_block`; BULK: by a bulk copy from the descriptor ``boxes``, the next sequence's tokens for zeros."""
    if BULK:
        return boxes.load([table + start, head * D])
    else:
        return load_block(base, table, start, length, D, STRIDE, PAGE, MASKED)


@triton.jit
def load_block(
    base, table, start, length, D: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Keys or values [KEYS, D] of tokens start .. start + KEYS - 1; zeros beyond the sequence."""
    key = start + tl.arange(0, KEYS)
    if PAGE > 0 and PAGE % 64 == 0:  # the block lies in one page
        rows = place_of(table, start, length, STRIDE, PAGE) + tl.arange(0, KEYS) * STRIDE
    else:
        rows = place_of(table, key, length, STRIDE, PAGE)
    pointers = base + rows[:, None] + tl.arange(0, D)[None, :]
    if MASKED:
        return tl.load(pointers, mask=(key < length)[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def explicit_scores(
    q_rows, in_rows, keys, table, start, length,
    D: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Products of queries and keys, one FMA per feature: [ROWS, KEYS]."""
    key = start + tl.arange(0, KEYS)
    rows = place_of(table, key, length, STRIDE, PAGE)
    s = tl.zeros([ROWS, KEYS], tl.float32)
    for d in range(D):
        a = widen(tl.load(q_rows + d, mask=in_rows, other=0.0))
        b = widen(tl.load(keys + rows + d, mask=key < length, other=0.0))
        s = tl.fma(a[:, None], b[None, :], s)
    return s


@triton.jit
def explicit_values(
    p, row_end, values, table, start, length, total,
    D: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """total + p @ values, one FMA per key; a key that a row does not see counts as zero."""
    index = tl.arange(0, KEYS)
    columns = tl.arange(0, D)
    for j in range(KEYS):
        weight = tl.sum(tl.where((index == j)[None, :], p, 0.0), axis=1)  # one term: exact
        place = place_of(table, start + j, length, STRIDE, PAGE)
        v = widen(tl.load(values + place + columns, mask=columns < tl.where(start + j < length, D, 0), other=0.0))
        v = tl.where((start + j < row_end)[:, None], v[None, :], 0.0)
        total = tl.fma(weight[:, None], v, total)
    return total


@triton.jit
def add_undefined(
    p, row_end, values, table, start, length, total,
    D: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """total, plus p * v of the infinite and NaN values that a row sees."""
    index = tl.arange(0, KEYS)
    columns = tl.arange(0, D)
    for j in range(KEYS):
        weight = tl.sum(tl.where((index == j)[None, :], p.to(tl.float32), 0.0), axis=1)
        place = place_of(table, start + j, length, STRIDE, PAGE)
        v = widen(tl.load(values + place + columns, mask=columns < tl.where(start + j < length, D, 0), other=0.0))
        counts = (start + j < row_end)[:, None] & (~(tl.abs(v) < INFINITY))[None, :]
        total = tl.where(counts, total + weight[:, None] * v[None, :], total)
    return total


@triton.jit
def nan_or_larger(a, b):
    """NaN if either is NaN, else the larger."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finite_exp2(x):
    """`exp2_nonpositive` of x <= 0 without NaN: at -127 the sum of bits is zero by itself."""
    reduced = tl.maximum(x, -127.0)
    shifted = reduced + TO_INTEGER
    return from_bits((bits(shifted) << 23) + bits(exp2_polynomial(reduced - (shifted - TO_INTEGER))))


@triton.jit
def visit(
    q, q_rows, in_rows, row_end, keys, values, key_boxes, value_boxes, head, table, start, length, scale,
    maximum, total, weighed,
    D: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, MASKED: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """The state (maximum, row sum, weighted values) after the block of keys at ``start``."""
    if STEP == _EXPLICIT:
        s = explicit_scores(q_rows, in_rows, keys, table, start, length, D, STRIDE, PAGE, ROWS)
    else:
        k = fetch_block(keys, key_boxes, head, table, start, length, D, STRIDE, PAGE, MASKED, BULK)
        if STEP == _FLOAT32:
            k = k.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
    s = s * scale
    seen = (start + tl.arange(0, KEYS))[None, :] < row_end[:, None]
    if MASKED:
        s = tl.where(seen, s, -INFINITY)
    if MASKED or STEP == _EXPLICIT:
        higher = tl.maximum(maximum, tl.max(s, axis=1))
        alpha = exp2_nonpositive(tl.where(maximum == higher, 0.0, maximum - higher))
        p = exp2_nonpositive(s - higher[:, None])
        p = tl.where(seen, p, 0.0)
    else:
        # every row sees every key here: a NaN or an infinite maximum makes the row NaN, so that no element need ask
        higher = tl.maximum(maximum, tl.reduce(s, 1, nan_or_larger), propagate_nan=tl.PropagateNan.ALL)
        alpha = exp2_nonpositive(tl.where(maximum == higher, 0.0, maximum - higher))
        alpha = tl.where(tl.abs(higher) < INFINITY, alpha, float("nan"))
        p = finite_exp2(s - higher[:, None])
    total = tl.fma(total, alpha, pairs_tree(p, ROWS, KEYS))
    weighed = weighed * alpha[:, None]
    p = narrow(p, keys.dtype.element_ty)
    if STEP == _EXPLICIT:
        weighed = explicit_values(widen(p), row_end, values, table, start, length, weighed, D, STRIDE, PAGE)
    else:
        v = fetch_block(values, value_boxes, head, table, start, length, D, STRIDE, PAGE, MASKED, BULK)
        if STEP == _FLOAT32:
            p = p.to(tl.float32)
            v = v.to(tl.float32)
        if MASKED:
            finite = tl.abs(v.to(tl.float32)) < INFINITY
            if not BULK:
                weighed = tl.dot(p, tl.where(finite, v, 0.0).to(v.dtype), weighed, input_precision="ieee")
            # in a product, 0 * Inf would reach the rows that do not see the Inf
            if tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 0:
                if BULK:
                    weighed = tl.dot(p, tl.where(finite, v, 0.0).to(v.dtype), weighed, input_precision="ieee")
                weighed = add_undefined(p, row_end, values, table, start, length, weighed, D, STRIDE, PAGE)
            elif BULK:  # straight from where the copy left it
                weighed = tl.dot(p, v, weighed, input_precision="ieee")
        else:
            weighed = tl.dot(p, v, weighed, input_precision="ieee")
    return higher, total, weighed


@triton.jit
def attention_kernel(
    q, keys, values, key_boxes, value_boxes, tables, query_starts, key_extents, output, maxima, sums,
    q_stride, table_stride, scale,
    GROUP: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr,
    SAVE: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Rows [tile * ROWS, + ROWS) of sequence program_id(2) under KV head program_id(1).

    key_extents: lengths of the sequences in the cache, or (PAGE 0) first rows of their keys.
    BULK: key_boxes and value_boxes are descriptors [tokens, KV_HEADS * D] of packed keys and values.
    """
    STRIDE: tl.constexpr = KV_HEADS * D
    HEADS: tl.constexpr = KV_HEADS * GROUP
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_query = tl.load(query_starts + sequence)
    queries = tl.load(query_starts + sequence + 1) - first_query
    # the last tiles see the most keys: start them first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if tile * ROWS >= queries * GROUP:
        return
    if PAGE == 0:
        table = tl.load(key_extents + sequence)
        length = tl.load(key_extents + sequence + 1) - table
    else:
        table = tables + sequence.to(tl.int64) * table_stride
        length = tl.load(key_extents + sequence)
    row = tile * ROWS + tl.arange(0, ROWS)
    in_rows = row < queries * GROUP
    token = row // GROUP
    line = (first_query + token).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    q_rows = q + line * q_stride + query_head * D
    columns = tl.arange(0, D)
    if STEP == _EXPLICIT:
        tile_q = q_rows
    else:
        tile_q = tl.load(q_rows[:, None] + columns[None, :], mask=in_rows[:, None], other=0.0)
        if STEP == _FLOAT32:
            tile_q = tile_q.to(tl.float32)
    if CAUSAL:
        row_end = tl.where(in_rows, length - queries + token + 1, 0)
        shared_end = length - queries + tile * ROWS // GROUP + 1
        last_token = tl.minimum((tile * ROWS + ROWS - 1) // GROUP, queries - 1)
        end = length - queries + last_token + 1
    else:
        row_end = tl.where(in_rows, length, 0)
        shared_end = length
        end = length
    maximum = tl.full([ROWS], -INFINITY, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighed = tl.zeros([ROWS, D], tl.float32)
    keys += head * D
    values += head * D
    # products by plain FMA are long code: one loop for all blocks
    whole = 0 if STEP == _FLOAT32 else shared_end // KEYS * KEYS
    for start in range(0, whole, KEYS):
        maximum, total, weighed = visit(
            tile_q, q_rows, in_rows, row_end, keys, values, key_boxes, value_boxes, head, table, start, length, scale,
            maximum, total, weighed, D, STRIDE, PAGE, ROWS, STEP, False, BULK,
        )  # fmt: skip
    for start in range(whole, end, KEYS):
        maximum, total, weighed = visit(
            tile_q, q_rows, in_rows, row_end, keys, values, key_boxes, value_boxes, head, table, start, length, scale,
            maximum, total, weighed, D, STRIDE, PAGE, ROWS, STEP, True, BULK,
        )  # fmt: skip
    result = div_rn(weighed, tl.broadcast_to(total[:, None], [ROWS, D])) + 0.0
    place = output + (line * HEADS + query_head)[:, None] * D + columns[None, :]
    tl.store(place, narrow(result, output.dtype.element_ty), mask=in_rows[:, None])
    if SAVE:
        tl.store(maxima + line * HEADS + query_head, maximum, mask=in_rows)
        tl.store(sums + line * HEADS + query_head, total, mask=in_rows)
