# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The schedule of `fastpath.matmul` for many tokens on Hopper: persistent programs, operands by bulk copies (TMA).

One loop runs over all K of all tiles of a program, so that copies stay ahead across segments and tiles. The sums that
wait in a tree would not fit beside the accumulators: they wait in a workspace of the program, in the L2 cache.
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
from fastpath.schedules import Schedule

if TYPE_CHECKING:
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
    if out.dtype.element_ty == tl.float32 and BM * BN > 8192:
        # by halves: a float32 tile on its way to whole rows would take the shared memory of the operands
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
def settle(
    out, total, own, bias, index, part, row, column, M, N,
    LOCAL: tl.constexpr, SLOT: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Segment number ``index`` of LOCAL has ``total``: merge it as a binary counter would, and store the result.

    Sums of one, two and four segments wait in three slots of ``own``. The change of layout that begins every settlement
    synchronises the threads, so each sees what others stored at the last one. Pieces of 32 columns keep registers free.
    """
    if BN > 32:
        left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        settle(out, left, own, bias, index, part, row, column, M, N, LOCAL, SLOT, BIAS, BM, BN // 2)
        other = own + BM * BN // 2
        settle(out, right, other, bias, index, part, row, column + BN // 2, M, N, LOCAL, SLOT, BIAS, BM, BN // 2)
    else:
        one = own + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        two = one + SLOT
        four = two + SLOT
        if index % 2 == 0:
            tl.store(one, total)
        if index % 4 == 1:
            merged = tl.load(one) + total
            if LOCAL == 2:
                store_tile(out, merged, bias, part, row, column, M, N, BIAS, BM, BN)
            else:
                tl.store(two, merged)
        if LOCAL > 2:  # noqa: SIM102 - one condition is of the compiler, the other of the program
            if index % 8 == 3:
                merged = tl.load(two) + (tl.load(one) + total)
                if LOCAL == 4:
                    store_tile(out, merged, bias, part, row, column, M, N, BIAS, BM, BN)
                else:
                    tl.store(four, merged)
        if LOCAL > 4:  # noqa: SIM102
            if index == 7:
                merged = tl.load(four) + (tl.load(two) + (tl.load(one) + total))
                store_tile(out, merged, bias, part, row, column, M, N, BIAS, BM, BN)


@triton.jit(do_not_specialize=["M"])
def tree_kernel(
    x, w, bias, out, workspace, M, N, segment, parts,
    LOCAL: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out[part] = balanced tree over LOCAL (2, 4 or 8) segments, the first of them number part * LOCAL."""
    program = tl.program_id(0)
    own = workspace + program * (3 * BM * BN)
    steps = segment // BK
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN) * parts
    mine = tl.cdiv(tiles - program, PROGRAMS)
    total = tl.zeros((BM, BN), tl.float32)
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
        total = tl.dot(x.load([row, k]), tl.trans(w.load([column, k])), total)
        if step == steps - 1:
            settle(out, total, own, bias, index, part, row, column, M, N, LOCAL, BM * BN, BIAS, BM, BN)
            total = tl.zeros((BM, BN), tl.float32)


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
    contract: LinearContract,
    maxima: torch.Tensor | None = None,
) -> None:
    """Fill ``sums`` [parts, tokens, outputs] (or [tokens, outputs] for one part).

    ``maxima``: int32 [tokens, tiles of outputs], filled with row maxima of the tiles as ordered keys.
    """
    tokens, outputs = x.shape[0], weight.shape[0]
    tiles = triton.cdiv(tokens, plan.tokens) * triton.cdiv(outputs, plan.outputs) * parts
    programs = multiprocessors(x.device) * plan.residents
    grid = (min(programs, tiles),)
    operands = (
        TensorDescriptor.from_tensor(x, [plan.tokens, plan.k]),
        TensorDescriptor.from_tensor(weight, [plan.outputs, plan.k]),
        sums if bias is None else bias,
        sums,
    )
    sizes = (tokens, outputs, segment, parts)
    constants: dict[str, Any] = {
        "BIAS": bias is not None,
        "BM": plan.tokens,
        "BN": plan.outputs,
        "BK": plan.k,
        "GROUP": 8,
        "PROGRAMS": programs,
    }
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    if plan.local == 1:
        constants |= {"MAXIMA": maxima is not None, "SWAP": plan.swap}
        arguments = (*operands, sums if maxima is None else maxima, *sizes)
        launch(chain_kernel, grid, *arguments, contract=contract, options=options, **constants)
        return
    workspace = torch.empty(3 * plan.tokens * plan.outputs * grid[0], dtype=torch.float32, device=x.device)
    constants["LOCAL"] = plan.local
    launch(tree_kernel, grid, *operands, workspace, *sizes, contract=contract, options=options, **constants)
