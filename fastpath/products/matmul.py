# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The matrix product under linear, row_linear and lm_head: one chain over K per segment, a balanced tree over segments.

An output element is the same sequence of operations in every schedule. Segments of a tile may be added up in registers,
or by different programs through a float32 workspace; both follow the same tree.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from fastpath.backend import DTYPES, current_target, launch, require_fields, require_tensor, require_unit
from fastpath.primitives import from_bits, narrow, widen
from fastpath.products import matmul_hopper, schedules
from reference.contract.base import Contract
from reference.operators.linear import LinearContract

#: Ways to make one step along K: the matrix unit, the compiler's float32 product, one explicit FMA per k, and a matrix
#: unit in groups of 8 whose sums may be -0 (gfx942).
MATRIX, FLOAT32, EXPLICIT, SIGNED = 0, 1, 2, 3
_FLOAT32, _EXPLICIT, _SIGNED = tl.constexpr(FLOAT32), tl.constexpr(EXPLICIT), tl.constexpr(SIGNED)


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Coordinates of a tile: columns of GROUP tiles, so that programs in flight share weights in the L2 cache."""
    width = GROUP * tiles_n
    first = (tile // width) * GROUP
    height = min(tiles_m - first, GROUP)
    return first + (tile % width) % height, (tile % width) // height


@triton.jit
def chain(
    x, w, in_m, in_n, x_k, w_k, start, length, total,
    STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """total + sum over k in [start, start + length), ascending; x, w: pointers to rows. [BM, BN], or [BN, BM]."""
    if STEP == _EXPLICIT:
        for k in range(start, start + length):
            a = widen(tl.load(x + tl.cast(k, tl.int64) * x_k, mask=in_m, other=0.0))
            b = widen(tl.load(w + tl.cast(k, tl.int64) * w_k, mask=in_n, other=0.0))
            total = tl.fma(a[:, None], b[None, :], total)
        return total
    else:
        ks = tl.arange(0, BK)
        first = tl.cast(start, tl.int64)
        lead = 0
        if (
            STEP == _SIGNED and not EVEN
        ):  # a group of zeros after the last k would turn a sum of -0 into +0: zeros first
            lead = (BK - (length + 7) // 8 * 8 % BK) % BK
            first -= lead
        a_pointers = (x + first * x_k)[:, None] + ks[None, :] * x_k
        b_pointers = (w + first * w_k)[:, None] + ks[None, :] * w_k
        for k in range(-lead, length, BK):
            if EVEN:
                a = tl.load(a_pointers, mask=in_m[:, None], other=0.0)
                b = tl.load(b_pointers, mask=in_n[:, None], other=0.0)
            else:
                in_k = (ks < length - k)[None, :]
                if STEP == _SIGNED:
                    in_k = in_k & (ks >= -k)[None, :]
                a = tl.load(a_pointers, mask=in_m[:, None] & in_k, other=0.0)
                b = tl.load(b_pointers, mask=in_n[:, None] & in_k, other=0.0)
            if STEP == _FLOAT32:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
                if not EVEN:  # -0 * +0 leaves every accumulator alone; +0 * +0 would turn -0 into +0
                    a = tl.where(in_k, a, from_bits(tl.full((BM, BK), -(2**31), tl.int32)))
            if SWAP:
                total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
            else:
                total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
            a_pointers += BK * x_k
            b_pointers += BK * w_k
        return total


@triton.jit
def subtree(
    x, w, in_m, in_n, x_k, w_k, start, length, total,
    COUNT: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Balanced tree over COUNT neighbouring segments of ``length``, the first at ``start``, each from ``total``."""
    if COUNT == 1:
        return chain(x, w, in_m, in_n, x_k, w_k, start, length, total, STEP, SWAP, EVEN, BM, BN, BK)
    else:
        left = subtree(x, w, in_m, in_n, x_k, w_k, start, length, total, COUNT // 2, STEP, SWAP, EVEN, BM, BN, BK)
        middle = start + (COUNT // 2) * length
        right = subtree(x, w, in_m, in_n, x_k, w_k, middle, length, total, COUNT // 2, STEP, SWAP, EVEN, BM, BN, BK)
        return left + right


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x, w, bias, out, M, N, segment, x_m, x_k, w_n, w_k,
    LOCAL: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, CONTINUE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of one subtree of LOCAL segments: out[part, M, N], part = program_id(1).

    CONTINUE: a single chain goes on from the float32 sums that ``out`` holds.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    part = tl.program_id(1)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    in_m, in_n = m < M, n < N
    x_rows = x + m.to(tl.int64) * x_m
    w_rows = w + n.to(tl.int64) * w_n
    start = part * LOCAL * segment
    pointers = out + part.to(tl.int64) * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
    inside = in_m[:, None] & in_n[None, :]
    TRANSPOSED: tl.constexpr = SWAP and STEP != _EXPLICIT
    if CONTINUE:
        initial = tl.load(pointers, mask=inside, other=0.0)
    else:
        initial = tl.zeros((BN, BM) if TRANSPOSED else (BM, BN), tl.float32)
    total = subtree(x_rows, w_rows, in_m, in_n, x_k, w_k, start, segment, initial, LOCAL, STEP, SWAP, EVEN, BM, BN, BK)
    if TRANSPOSED:
        total = tl.trans(total)
    if BIAS:
        total += widen(tl.load(bias + n, mask=in_n, other=0.0))[None, :]
    tl.store(pointers, narrow(total, out.dtype.element_ty), mask=inside)


@triton.constexpr_function
def left_leaves(count):
    """Leaves left of the root where ``count`` of them merge by adjacent pairs, an odd last one passing through."""
    return 1 << ((count - 1).bit_length() - 1)


@triton.jit
def merge(parts, offset, inside, stride, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Balanced tree over COUNT neighbouring parts."""
    if COUNT == 1:
        return tl.load(parts + FIRST * stride + offset, mask=inside, other=0.0)
    else:
        LEFT: tl.constexpr = left_leaves(COUNT)
        left = merge(parts, offset, inside, stride, FIRST, LEFT)
        return left + merge(parts, offset, inside, stride, FIRST + LEFT, COUNT - LEFT)


@triton.jit
def merge_kernel(parts, bias, out, size, N, COUNT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = tree over p of parts[p, i] (+ bias[i % N]), rounded to the output's dtype."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    total = merge(parts, offset, inside, tl.cast(size, tl.int64), 0, COUNT)
    if BIAS:
        total += widen(tl.load(bias + offset % N, mask=inside, other=0.0))
    tl.store(out + offset, narrow(total, out.dtype.element_ty), mask=inside)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    contract: LinearContract,
    segments: int,
    output: torch.dtype,
    bias: torch.Tensor | None = None,
    plan: schedules.Schedule | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T in ``segments`` segments of K, rounded once to ``output``. Shapes and dtypes are not checked here.

    Args:
        x: [tokens, inputs], any strides.
        weight: [outputs, inputs], any strides, of x's dtype.
        bias: [outputs], added to the float32 sum.
        plan: a schedule to use instead of the one for this shape: no schedule changes a bit.
        sums: float32 [tokens, outputs]: a single chain goes on from them, and leaves its sums there.

    Returns:
        [tokens, outputs], contiguous.

    Raises:
        UnsupportedError: this target has no such matrix unit.
        ValueError: inputs that ``segments`` does not divide.
    """
    unit, target = require_unit(contract), current_target()
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    if inputs == 0 or inputs % segments:
        raise ValueError(f"x: {inputs} inputs cannot be cut into {segments} equal segments")
    segment = inputs // segments
    plan = schedules.fit(
        plan or schedules.schedule(target, unit, tokens, outputs, segment, segments), x, weight, segments, target, unit
    )
    if plan.k_major:
        x, weight = (operand.t().float().contiguous().t() for operand in (x, weight))
    if sums is not None:
        _launch_tiles(x, weight, None, sums, segment, 1, replace(plan, swap=False), contract, goes_on=True)
        return sums
    out = torch.empty(tokens, outputs, dtype=output, device=x.device)
    if out.numel() == 0:
        return out
    parts = segments // plan.local
    partial = out if parts == 1 else torch.empty(parts, tokens, outputs, dtype=torch.float32, device=x.device)
    added = bias if parts == 1 else None
    if plan.persistent:
        matmul_hopper.launch_persistent(x, weight, added, partial, segment, parts, plan, contract)
    else:
        _launch_tiles(x, weight, added, partial, segment, parts, plan, contract)
    if parts > 1:
        merge_parts(partial, out, bias, contract)
    return out


def merge_parts(parts: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, contract: Contract) -> None:
    """Fill ``out`` [..., features] with the tree over float32 ``parts`` [count, ...] (+ bias), rounded once."""
    size, block = out.numel(), 1024
    launch(
        merge_kernel,
        (triton.cdiv(size, block),),
        *(parts, out if bias is None else bias, out, size, out.shape[-1]),
        contract=contract,
        COUNT=parts.shape[0],
        BIAS=bias is not None,
        BLOCK=block,
    )


def _launch_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sums: torch.Tensor,
    segment: int,
    parts: int,
    plan: schedules.Schedule,
    contract: LinearContract,
    goes_on: bool = False,
) -> None:
    tokens, outputs = x.shape[0], weight.shape[0]
    tiles = triton.cdiv(tokens, plan.tokens) * triton.cdiv(outputs, plan.outputs)
    launch(
        tile_kernel,
        (tiles, parts),
        *(x, weight, sums if bias is None else bias, sums, tokens, outputs, segment, *x.stride(), *weight.stride()),
        contract=contract,
        options={"num_warps": plan.warps, "num_stages": plan.stages},
        LOCAL=plan.local,
        STEP=step_of(contract),
        SWAP=plan.swap,
        EVEN=segment % plan.k == 0,
        BIAS=bias is not None,
        CONTINUE=goes_on,
        BM=plan.tokens,
        BN=plan.outputs,
        BK=plan.k,
        GROUP=8,
    )


def step_of(contract: LinearContract) -> int:
    """How this target makes one step along K of the contract's unit."""
    if contract.primitives.unit != "fma32-seq":
        return SIGNED if contract.primitives.unit == "mfma-cdna3-g8" else MATRIX
    # the interpreter's product is NumPy's, in an order of its own
    return EXPLICIT if current_target().runtime == "interpreter" else FLOAT32


def require_contract(contract: LinearContract, bias: torch.Tensor | None) -> None:
    """Refuse what the kernels do not compute.

    Raises:
        UnsupportedError: naming the field.
    """
    require_fields(
        contract,
        {
            "domain.input": tuple(DTYPES),
            "partition.segments": (1, 2, 4, 8, 16),
            "partition.block_k": 0,
            "order.k": "ascending",
            "order.merge": "tree",
            "rounding.partial": "float32",
            "rounding.output": tuple(DTYPES),
        },
    )
    if bias is not None:
        require_fields(contract, {"order.bias": "before_rounding"})


def require_operands(
    x: torch.Tensor, weight: torch.Tensor, contract: LinearContract, bias: torch.Tensor | None
) -> torch.dtype:
    """Check the operands against each other and the contract; returns the output's dtype.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device of an argument.
    """
    dtype = DTYPES[contract.domain.input]
    require_tensor(x, "x", "tokens, inputs", dtype)
    require_tensor(weight, "weight", f"outputs, inputs={x.shape[1]}", dtype)
    if bias is not None:
        require_tensor(bias, "bias", f"outputs={weight.shape[0]}", *DTYPES.values())
    return DTYPES[contract.rounding.output]
