# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Attention of one token per sequence by many programs, and no split of the keys that a contract would have to name.

Only the chains of the weighted values and of the row sum are sequential in the contract. Scores do not depend on other
blocks; the running maximum is a maximum of block maxima, exact in any order, so each block's probabilities are found
alone; and the chain of one output feature needs no other feature. So blocks spread over programs in the first two
kernels, and features in the third: the bits are those of the single pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpath._attention_kernel import INFINITY, KEYS, load_block, place_of
from fastpath.primitives import div_rn, exp2_nonpositive, narrow, pairs_tree

#: Rows of a matrix instruction: the heads that share a KV head, padded.
ROWS = tl.constexpr(16)
#: Blocks whose rescaling factors the third kernel loads at once.
AHEAD = 16
#: Key blocks of one program of the first kernel, and of the second.
SCORE_BLOCKS, PROBABILITY_BLOCKS = 2, 4
#: Output features of one program of the third kernel.
FEATURES = 16


@triton.jit
def extent_of(tables, key_extents, sequence, table_stride, PAGE: tl.constexpr):
    """Table (or first row) and number of keys of a sequence."""
    if PAGE == 0:
        table = tl.load(key_extents + sequence)
        length = tl.load(key_extents + sequence + 1) - table
    else:
        table = tables + sequence.to(tl.int64) * table_stride
        length = tl.load(key_extents + sequence)
    return table, length


@triton.jit
def scores_kernel(
    q, keys, tables, query_starts, key_extents, scores, maxima, q_stride, table_stride, scale, blocks,
    GROUP: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Scaled scores of COUNT blocks, [lines, blocks * KEYS], and their block maxima, [lines, blocks]."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    table, length = extent_of(tables, key_extents, sequence, table_stride, PAGE)
    first = tl.program_id(0) * COUNT
    if first * KEYS < length:
        row = tl.arange(0, ROWS)
        in_rows = row < GROUP
        line = tl.load(query_starts + sequence).to(tl.int64)
        q_rows = q + line * q_stride + (head * GROUP + row) * D
        tile = tl.load(q_rows[:, None] + tl.arange(0, D)[None, :], mask=in_rows[:, None], other=0.0)
        lines = (sequence * KV_HEADS + head).to(tl.int64) * GROUP + row
        for block in range(first, tl.minimum(first + COUNT, tl.cdiv(length, KEYS))):
            k = load_block(keys + head * D, table, block * KEYS, length, D, KV_HEADS * D, PAGE, True)
            s = tl.dot(tile, tl.trans(k), input_precision="ieee") * scale
            key = block * KEYS + tl.arange(0, KEYS)
            s = tl.where((key < length)[None, :], s, -INFINITY)
            tl.store(scores + (lines * blocks * KEYS)[:, None] + key[None, :], s, mask=in_rows[:, None])
            tl.store(maxima + lines * blocks + block, tl.max(s, axis=1), mask=in_rows)


@triton.jit
def probabilities_kernel(
    scores, maxima, tables, key_extents, probabilities, alphas, sums, table_stride, blocks,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Rounded probabilities, rescaling factors and row sums of COUNT blocks."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    _, length = extent_of(tables, key_extents, sequence, table_stride, PAGE)
    first = tl.program_id(0) * COUNT
    if first * KEYS < length:
        row = tl.arange(0, ROWS)
        in_rows = row < GROUP
        lines = (sequence * KV_HEADS + head).to(tl.int64) * GROUP + row
        maximum = tl.full([ROWS], -INFINITY, tl.float32)
        for start in range(0, first, SCAN):
            block = start + tl.arange(0, SCAN)
            before = in_rows[:, None] & (block < first)[None, :]
            found = tl.load(maxima + (lines * blocks)[:, None] + block[None, :], mask=before, other=-INFINITY)
            maximum = tl.maximum(maximum, tl.max(found, axis=1))
        for block in range(first, tl.minimum(first + COUNT, tl.cdiv(length, KEYS))):
            key = block * KEYS + tl.arange(0, KEYS)
            places = (lines * blocks * KEYS)[:, None] + key[None, :]
            s = tl.load(scores + places, mask=in_rows[:, None], other=-INFINITY)
            higher = tl.maximum(maximum, tl.load(maxima + lines * blocks + block, mask=in_rows, other=-INFINITY))
            alpha = exp2_nonpositive(tl.where(maximum == higher, 0.0, maximum - higher))
            p = tl.where((key < length)[None, :], exp2_nonpositive(s - higher[:, None]), 0.0)
            tl.store(alphas + lines * blocks + block, alpha, mask=in_rows)
            tl.store(sums + lines * blocks + block, pairs_tree(p, ROWS, KEYS), mask=in_rows)
            tl.store(probabilities + places, narrow(p, probabilities.dtype.element_ty), mask=in_rows[:, None])
            maximum = higher


@triton.jit
def values_kernel(
    probabilities, alphas, sums, values, tables, query_starts, key_extents, output, table_stride, blocks,
    GROUP: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """COLUMNS output features of the rows under one KV head: the chains, ascending."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    queries = tl.load(query_starts + sequence + 1) - tl.load(query_starts + sequence)
    table, length = extent_of(tables, key_extents, sequence, table_stride, PAGE)
    if queries == 0:
        return
    row = tl.arange(0, ROWS)
    in_rows = row < GROUP
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    lines = (sequence * KV_HEADS + head).to(tl.int64) * GROUP + row
    ahead = tl.arange(0, AHEAD)
    block_lines = (lines * blocks)[:, None] + ahead[None, :]
    next_alphas = tl.zeros([ROWS, AHEAD], tl.float32)
    next_sums = tl.zeros([ROWS, AHEAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.cdiv(length, KEYS)):
        if block % AHEAD == 0:  # one wait for AHEAD blocks
            there = in_rows[:, None] & (block + ahead < blocks)[None, :]
            next_alphas = tl.load(alphas + block_lines + block, mask=there, other=0.0)
            next_sums = tl.load(sums + block_lines + block, mask=there, other=0.0)
        key = block * KEYS + tl.arange(0, KEYS)
        p_rows = (lines * blocks * KEYS)[:, None] + key[None, :]
        p = tl.load(probabilities + p_rows, mask=in_rows[:, None], other=0.0)
        here = (ahead == block % AHEAD)[None, :]  # one term: the sums are exact
        alpha = tl.sum(tl.where(here, next_alphas, 0.0), axis=1)
        total = tl.fma(total, alpha, tl.sum(tl.where(here, next_sums, 0.0), axis=1))
        places = place_of(table, key, length, KV_HEADS * D, PAGE)
        v_rows = values + head * D + places[:, None] + column[None, :]
        v = tl.load(v_rows, mask=(key < length)[:, None], other=0.0)
        weighed = tl.dot(p, v, weighed * alpha[:, None], input_precision="ieee")
    result = div_rn(weighed, tl.broadcast_to(total[:, None], [ROWS, COLUMNS])) + 0.0
    line = tl.load(query_starts + sequence).to(tl.int64)
    place = (line * KV_HEADS * GROUP + head * GROUP + row) * D
    tl.store(output + place[:, None] + column[None, :], narrow(result, output.dtype.element_ty), mask=in_rows[:, None])
