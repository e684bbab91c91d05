# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The matrix product under linear, row_linear and lm_head: one chain over K per segment, a balanced tree over segments.

An output element is the same sequence of operations in every schedule. Segments of a tile may be added up in registers,
or by different programs through a float32 workspace; both follow the same tree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastpath.backend import DTYPES, current_target, launch, require_fields, require_tensor, require_unit
from fastpath.collectives.merge import merge_parts
from fastpath.primitives import from_bits, narrow, widen
from fastpath.products import matmul_hopper, schedules
from reference.gradients import LinearBackwardContract
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
    x, w, in_m, in_n, x_k, w_k, start, length, stride, total,
    COUNT: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Balanced tree over COUNT neighbouring segments of ``length``, the first at ``start``, each from ``total``.

    A segment goes on through JOINED stretches of K that lie ``stride`` apart.
    """
    if COUNT == 1:
        for stretch in tl.static_range(JOINED):
            first = start + stretch * stride
            total = chain(x, w, in_m, in_n, x_k, w_k, first, length, total, STEP, SWAP, EVEN, BM, BN, BK)
        return total
    else:
        left = subtree(
            x, w, in_m, in_n, x_k, w_k, start, length, stride, total, COUNT // 2, STEP, SWAP, EVEN, BM, BN, BK, JOINED
        )
        middle = start + (COUNT // 2) * length
        right = subtree(
            x, w, in_m, in_n, x_k, w_k, middle, length, stride, total, COUNT // 2, STEP, SWAP, EVEN, BM, BN, BK, JOINED
        )
        return left + right


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x, w, bias, out, M, N, segment, stride, x_m, x_k, w_n, w_k,
    LOCAL: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, CONTINUE: tl.constexpr, JOINED: tl.constexpr,
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
    total = subtree(
        x_rows, w_rows, in_m, in_n, x_k, w_k, start, segment, stride, initial,
        LOCAL, STEP, SWAP, EVEN, BM, BN, BK, JOINED,
    )  # fmt: skip
    if TRANSPOSED:
        total = tl.trans(total)
    if BIAS:
        total += widen(tl.load(bias + n, mask=in_n, other=0.0))[None, :]
    tl.store(pointers, narrow(total, out.dtype.element_ty), mask=inside)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    contract: LinearContract | LinearBackwardContract,
    segments: int,
    output: torch.dtype,
    bias: torch.Tensor | None = None,
    plan: schedules.Schedule | None = None,
    sums: torch.Tensor | None = None,
    joined: int = 1,
    merged: bool = True,
) -> torch.Tensor:
    """x @ weight^T in ``segments`` segments of K, rounded once to ``output``. Shapes and dtypes are not checked here.

    Args:
        x: [tokens, inputs], any strides.
        weight: [outputs, inputs], any strides, of x's dtype.
        bias: [outputs], added to the float32 sum.
        plan: a schedule to use instead of the one for this shape: no schedule changes a bit.
        sums: float32 [tokens, outputs]: a single chain goes on from them, and leaves its sums there.
        joined: inputs are so many equal stretches; a segment is the same part of each, one after the other.

        merged: whether sums of segments in a workspace are merged; else they are what is returned.

    Returns:
        [tokens, outputs], contiguous; not merged, where the schedule has a workspace: float32 [parts, tokens, outputs].

    Raises:
        UnsupportedError: this target has no such matrix unit.
        ValueError: inputs that ``segments`` does not divide.
    """
    unit, target = require_unit(contract), current_target()
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    if inputs == 0 or inputs % (segments * joined):
        raise ValueError(f"x: {inputs} inputs cannot be cut into {segments * joined} equal segments")
    segment = inputs // (segments * joined)
    plan = schedules.fit(
        plan or schedules.schedule(target, unit, tokens, outputs, segment, segments), x, weight, segments, target, unit
    )
    if plan.k_major:
        x, weight = (operand.t().float().contiguous().t() for operand in (x, weight))
    if joined > 1 and plan.persistent:  # bulk copies walk one stretch
        plan = schedules.pointers(plan)
    if sums is not None:
        _launch_tiles(x, weight, None, sums, segment, 1, replace(plan, swap=False), contract, joined, goes_on=True)
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
        _launch_tiles(x, weight, added, partial, segment, parts, plan, contract, joined)
    if parts > 1 and not merged:
        return partial
    if parts > 1:
        merge_parts(partial, out, bias, contract)
    return out


def _launch_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sums: torch.Tensor,
    segment: int,
    parts: int,
    plan: schedules.Schedule,
    contract: LinearContract | LinearBackwardContract,
    joined: int = 1,
    goes_on: bool = False,
) -> None:
    tokens, outputs = x.shape[0], weight.shape[0]
    tiles = triton.cdiv(tokens, plan.tokens) * triton.cdiv(outputs, plan.outputs)
    launch(
        tile_kernel,
        (tiles, parts),
        *(x, weight, sums if bias is None else bias, sums, tokens, outputs, segment, x.shape[1] // joined),
        *(*x.stride(), *weight.stride()),
        contract=contract,
        options={"num_warps": plan.warps, "num_stages": plan.stages},
        LOCAL=plan.local,
        STEP=step_of(contract),
        SWAP=plan.swap,
        EVEN=segment % plan.k == 0,
        BIAS=bias is not None,
        CONTINUE=goes_on,
        JOINED=joined,
        BM=plan.tokens,
        BN=plan.outputs,
        BK=plan.k,
        GROUP=8,
    )


def step_of(contract: LinearContract | LinearBackwardContract) -> int:
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
    _require_contract(contract, bias is not None)


@lru_cache(maxsize=256)
def _require_contract(contract: LinearContract, biased: bool) -> None:
    """Asked at every launch, so a contract that passed is remembered."""
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
    if biased:
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
