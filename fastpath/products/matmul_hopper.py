# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The schedule of `products.matmul` for many tokens on Hopper: persistent programs, operands by bulk copies (TMA).

One loop runs over all K of all tiles of a program, so that copies stay ahead across segments and tiles. Sums that wait
in a tree stay in registers: a tile of 64 accumulators a thread has room for four segments, one of 32 for eight.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpath.backend import launch
from fastpath.primitives import LOWEST, narrow, ordered, widen
from fastpath.products.schedules import Schedule

if TYPE_CHECKING:
    from reference.gradients import LinearBackwardContract
    from reference.operators.linear import LinearContract


@triton.jit
def locate(tile, M, N, parts, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Tile number -> part, first row, first column: columns of GROUP tiles share weights in the L2 cache."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    per_part = tiles_m * tiles_n
    part = tile // per_part
    tile = tile % per_part
    width = GROUP * tiles_n
    first = (tile // width) * GROUP
    height = min(tiles_m - first, GROUP)
    return part, (first + (tile % width) % height) * BM, ((tile % width) // height) * BN


@triton.jit
def store_tile(
    out, total, bias, part, row, column, M, N,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[part, row:, column:] = total (+ bias), rounded to the output's dtype."""
    if BN > 64 or (out.dtype.element_ty == tl.float32 and BM * BN > 4096):
        # by halves: a tile on its way to whole rows would take the shared memory of the operands
        left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        store_tile(out, left, bias, part, row, column, M, N, BIAS, BM, BN // 2)
        store_tile(out, right, bias, part, row, column + BN // 2, M, N, BIAS, BM, BN // 2)
    else:
        m = row + tl.arange(0, BM)
        n = column + tl.arange(0, BN)
        if BIAS:
            total += widen(tl.load(bias + n, mask=n < N, other=0.0))[None, :]
        rows = out + part.to(tl.int64) * M * N + m.to(tl.int64)[:, None] * N
        tl.store(rows + n[None, :], narrow(total, out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def chain_kernel(
    x, w, bias, out, maxima, M, N, segment, parts,
    BIAS: tl.constexpr, MAXIMA: tl.constexpr, SWAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out[part] = chain over segment number part. x [M, K], w [N, K]: descriptors; out [parts, M, N].

    MAXIMA: also maxima[row, tile of columns] = largest key of the row in the tile, for the log-sum-exp.
    """
    steps = tl.cdiv(segment, BK)
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN) * parts
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        part, row, column = locate(tile, M, N, parts, BM, BN, GROUP)
        total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        for step in range(steps):
            k = part * segment + step * BK
            if SWAP:
                total = tl.dot(w.load([column, k]), tl.trans(x.load([row, k])), total)
            else:
                total = tl.dot(x.load([row, k]), tl.trans(w.load([column, k])), total)
        if SWAP:
            total = tl.trans(total)
        store_tile(out, total, bias, part, row, column, M, N, BIAS, BM, BN)
        if MAXIMA:
            m = row + tl.arange(0, BM)
            keys = tl.where((column + tl.arange(0, BN) < N)[None, :], ordered(total), LOWEST)
            tl.store(maxima + m.to(tl.int64) * tl.cdiv(N, BN) + column // BN, tl.max(keys, axis=1), mask=m < M)


@triton.jit
def store_sum(
    out, total, bias, part, row, column, M, N,
    BIAS: tl.constexpr, SWAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`store_tile` of an accumulator [BM, BN] or, SWAP, [BN, BM]."""
    if SWAP:
        total = tl.trans(total)
    store_tile(out, total, bias, part, row, column, M, N, BIAS, BM, BN)


@triton.jit(do_not_specialize=["M"])
def tree_kernel(
    x, w, bias, out, M, N, segment, parts,
    LOCAL: tl.constexpr, BIAS: tl.constexpr, SWAP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out[part] = balanced tree over LOCAL (2, 4 or 8) segments, the first of them number part * LOCAL.

    Sums merge as in a binary counter: those of one, two and four segments wait in registers.
    """
    program = tl.program_id(0)
    steps = segment // BK
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN) * parts
    mine = tl.cdiv(tiles - program, PROGRAMS)
    total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    one = total
    two = total
    four = total
    # one flat loop over all K of all tiles: written as a nest, the copies would run dry at the end of every segment
    step = steps - 1
    index = LOCAL - 1
    tile = program - PROGRAMS
    part, row, column = 0, 0, 0
    for _ in range(0, mine * LOCAL * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            index = tl.where(index == LOCAL - 1, 0, index + 1)
            if index == 0:
                tile += PROGRAMS
                part, row, column = locate(tile, M, N, parts, BM, BN, GROUP)
        k = (part * LOCAL + index) * segment + step * BK
        if SWAP:
            total = tl.dot(w.load([column, k]), tl.trans(x.load([row, k])), total)
        else:
            total = tl.dot(x.load([row, k]), tl.trans(w.load([column, k])), total)
        if step == steps - 1:
            # choices, not branches: a sum that a branch handed on would have to be complete at every step
            merged = one + total
            if LOCAL > 2:
                pair = merged
                merged = two + pair
                if LOCAL > 4:
                    quad = merged
                    merged = four + quad
            if index == LOCAL - 1:
                store_sum(out, merged, bias, part, row, column, M, N, BIAS, SWAP, BM, BN)
            if LOCAL > 4:
                four = tl.where(index == 3, quad, four)
            if LOCAL > 2:
                two = tl.where(index % 4 == 1, pair, two)
            one = tl.where(index % 2 == 0, total, one)
            total = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors; an H200's while code is only planned."""
    return 132 if device.type == "meta" else int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_persistent(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sums: torch.Tensor,
    segment: int,
    parts: int,
    plan: Schedule,
    contract: LinearContract | LinearBackwardContract,
    maxima: torch.Tensor | None = None,
) -> None:
    """Fill ``sums`` [parts, tokens, outputs] (or [tokens, outputs] for one part).

    ``maxima``: int32 [tokens, tiles of outputs], filled with row maxima of the tiles as ordered keys.
    """
    tokens, outputs = x.shape[0], weight.shape[0]
    tiles = triton.cdiv(tokens, plan.tokens) * triton.cdiv(outputs, plan.outputs) * parts
    programs = multiprocessors(x.device) * plan.residents
    grid = (min(programs, tiles),)
    rows = TensorDescriptor.from_tensor(x, [plan.tokens, plan.k])
    columns = TensorDescriptor.from_tensor(weight, [plan.outputs, plan.k])
    added, sizes = sums if bias is None else bias, (tokens, outputs, segment, parts)
    constants: dict[str, Any] = {
        "BIAS": bias is not None,
        "SWAP": plan.swap,
        "BM": plan.tokens,
        "BN": plan.outputs,
        "BK": plan.k,
        "GROUP": 8,
        "PROGRAMS": programs,
    }
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    if plan.local == 1:
        constants["MAXIMA"] = maxima is not None
        given = (rows, columns, added, sums, sums if maxima is None else maxima, *sizes)
        launch(chain_kernel, grid, *given, contract=contract, options=options, **constants)
        return
    constants["LOCAL"] = plan.local
    launch(tree_kernel, grid, rows, columns, added, sums, *sizes, contract=contract, options=options, **constants)
