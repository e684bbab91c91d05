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

from fastpath.attention._kernel import INFINITY, KEYS, load_block, place_of
from fastpath.primitives import div_rn, exp2_nonpositive, narrow, pairs_tree

#: Rows of the matrix product of scores: the heads that share a KV head, padded.
TALL = tl.constexpr(16)
#: Key blocks of one program of the second kernel.
PROBABILITY_BLOCKS = 2
#: Output features of one program of the third kernel.
FEATURES = 32


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
    GROUP: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scaled scores of a block, [sequences, KV heads, blocks, ROWS, KEYS], and their maxima over KEYS."""
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table, length = extent_of(tables, key_extents, sequence, table_stride, PAGE)
    if block * KEYS < length:
        row = tl.arange(0, TALL)
        line = tl.load(query_starts + sequence).to(tl.int64)
        q_rows = q + line * q_stride + (head * GROUP + row) * D
        tile = tl.load(q_rows[:, None] + tl.arange(0, D)[None, :], mask=(row < GROUP)[:, None], other=0.0)
        k = load_block(keys + head * D, table, block * KEYS, length, D, KV_HEADS * D, PAGE, True)
        s = tl.dot(tile, tl.trans(k), input_precision="ieee") * scale
        index = tl.arange(0, KEYS)
        key = block * KEYS + index
        s = tl.where((key < length)[None, :], s, -INFINITY)
        line = ((sequence * KV_HEADS + head).to(tl.int64) * blocks + block) * ROWS + row
        tl.store(scores + (line * KEYS)[:, None] + index[None, :], s, mask=(row < ROWS)[:, None])
        tl.store(maxima + line, tl.max(s, axis=1), mask=row < ROWS)


@triton.jit
def probabilities_kernel(
    scores, maxima, tables, key_extents, probabilities, alphas, sums, table_stride, blocks,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Rounded probabilities, rescaling factors and row sums of COUNT blocks, laid out as the scores are."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    _, length = extent_of(tables, key_extents, sequence, table_stride, PAGE)
    first = tl.program_id(0) * COUNT
    if first * KEYS < length:
        row = tl.arange(0, ROWS)
        cell = (sequence * KV_HEADS + head).to(tl.int64) * blocks
        maximum = tl.full([ROWS], -INFINITY, tl.float32)
        for start in range(0, first, SCAN):
            block = start + tl.arange(0, SCAN)
            places = (cell + block)[:, None] * ROWS + row[None, :]
            found = tl.load(maxima + places, mask=(block < first)[:, None], other=-INFINITY)
            maximum = tl.maximum(maximum, tl.max(found, axis=0))
        for block in range(first, tl.minimum(first + COUNT, tl.cdiv(length, KEYS))):
            index = tl.arange(0, KEYS)
            line = (cell + block) * ROWS + row
            places = line[:, None] * KEYS + index[None, :]
            s = tl.load(scores + places)
            higher = tl.maximum(maximum, tl.load(maxima + line))
            alpha = exp2_nonpositive(tl.where(maximum == higher, 0.0, maximum - higher))
            key = block * KEYS + index
            p = tl.where((key < length)[None, :], exp2_nonpositive(s - higher[:, None]), 0.0)
            tl.store(alphas + line, alpha)
            tl.store(sums + line, pairs_tree(p, ROWS, KEYS))
            tl.store(probabilities + places, narrow(p, probabilities.dtype.element_ty))
            maximum = higher


@triton.jit
def weigh(
    p_rows, alphas, sums, v_base, table, block, length, total, weighed,
    PAGE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Row sums, the same in every column, and weighted values, [COLUMNS, ROWS], after one more block."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    # both operands as the product takes them: a transposition in between would keep copies from running ahead
    line = block * ROWS + row  # counted, not a pointer that the loop carries: Triton 3.6 cannot analyse that for gfx942
    p = tl.load(p_rows + line[None, :] * KEYS + tl.arange(0, KEYS)[:, None])
    alpha = tl.broadcast_to(tl.load(alphas + line)[None, :], [COLUMNS, ROWS])
    total = tl.fma(total, alpha, tl.broadcast_to(tl.load(sums + line)[None, :], [COLUMNS, ROWS]))
    start = block * KEYS
    key = start + tl.arange(0, KEYS)
    if PAGE > 0 and PAGE % 64 == 0:  # the block lies in one page
        rows = place_of(table, start, length, STRIDE, PAGE) + tl.arange(0, KEYS) * STRIDE
    else:
        rows = place_of(table, key, length, STRIDE, PAGE)
    pointers = v_base + rows[None, :] + column[:, None]
    if MASKED:  # noqa: SIM108 - the compiler's choice
        v = tl.load(pointers, mask=(key < length)[None, :], other=0.0)
    else:
        v = tl.load(pointers)
    # values on the left: 16 features fill the long side of the matrix instruction, rows the short one
    weighed = tl.dot(v, p, weighed * alpha, input_precision="ieee")
    return total, weighed


@triton.jit
def values_kernel(
    probabilities, alphas, sums, values, tables, query_starts, key_extents, output, table_stride, blocks,
    GROUP: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """COLUMNS output features of the rows under one KV head: the chains, ascending."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_query = tl.load(query_starts + sequence)
    table, length = extent_of(tables, key_extents, sequence, table_stride, PAGE)
    if tl.load(query_starts + sequence + 1) == first_query:
        return
    cell = (sequence * KV_HEADS + head).to(tl.int64) * blocks
    p_rows = probabilities + cell * (ROWS * KEYS)
    alpha_rows = alphas + cell * ROWS
    sum_rows = sums + cell * ROWS
    v_base = values + head * D + tl.program_id(0) * COLUMNS
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    weighed = tl.zeros([COLUMNS, ROWS], tl.float32)
    whole = length // KEYS
    # several blocks a step: the operands of one are fetched while the chain of another runs
    for step in tl.range(0, whole // UNROLL, num_stages=STAGES):
        for turn in tl.static_range(UNROLL):
            total, weighed = weigh(
                p_rows, alpha_rows, sum_rows, v_base, table, step * UNROLL + turn, length, total, weighed,
                PAGE, KV_HEADS * D, ROWS, COLUMNS, False,
            )  # fmt: skip
    if UNROLL > 1:
        for block in tl.range(whole // UNROLL * UNROLL, whole, num_stages=1):
            total, weighed = weigh(
                p_rows, alpha_rows, sum_rows, v_base, table, block, length, total, weighed,
                PAGE, KV_HEADS * D, ROWS, COLUMNS, False,
            )  # fmt: skip
    if whole * KEYS < length:
        total, weighed = weigh(
            p_rows, alpha_rows, sum_rows, v_base, table, whole, length, total, weighed,
            PAGE, KV_HEADS * D, ROWS, COLUMNS, True,
        )  # fmt: skip
    result = div_rn(weighed, total) + 0.0
    row = tl.arange(0, ROWS)
    place = (first_query.to(tl.int64) * KV_HEADS * GROUP + head * GROUP + row) * D + tl.program_id(0) * COLUMNS
    pointers = output + place[None, :] + tl.arange(0, COLUMNS)[:, None]
    tl.store(pointers, narrow(result, output.dtype.element_ty), mask=(row < GROUP)[None, :])
