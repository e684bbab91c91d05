# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Linear projections of rows that chose an expert, by that expert's weight: `reference.operators.linear`, row by row.

A row's sums go through K as in any other product: in one chain per segment, whichever rows share its tile and however
many of them chose the expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastpath._tensors import INDEX_TYPES
from fastpath.backend import DTYPES, current_target, launch, require_tensor, require_unit
from fastpath.collectives.merge import merge_parts
from fastpath.primitives import narrow
from fastpath.products import schedules
from fastpath.products.matmul import EXPLICIT, require_contract, step_of, subtree
from fastpath.products.schedules import Schedule
from reference.operators.linear import LinearContract

_EXPLICIT = tl.constexpr(EXPLICIT)


class Groups(NamedTuple):
    """Choices sorted by expert; made on the device, so a step that makes them can be captured."""

    #: int64 [rows]: the token of each row, by expert, within one ascending.
    tokens: torch.Tensor
    #: int64 [tokens, k]: the row of each choice.
    places: torch.Tensor
    #: int64 [experts + 1]: the first row of each expert, and their number.
    starts: torch.Tensor


def group(experts: torch.Tensor, number: int) -> Groups:
    """Sort the choices ``experts`` [tokens, k] of ``number`` experts.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device.
    """
    require_tensor(experts, "experts", "tokens, k", *INDEX_TYPES)
    flat = experts.reshape(-1).to(torch.int64)
    order = torch.sort(flat, stable=True).indices
    rows = torch.arange(len(flat), device=flat.device)
    counts = torch.zeros(number, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    places = torch.empty_like(order).scatter_(0, order, rows)
    tokens = torch.div(order, max(1, experts.shape[1]), rounding_mode="floor")
    return Groups(tokens, places.view(experts.shape), starts)


@triton.jit(do_not_specialize=["M"])
def grouped_kernel(
    x, w, sources, starts, tile_ends, out, M, N, EXPERTS, segment, x_m, x_k, w_e, w_n, w_k,
    LOCAL: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, GATHER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one expert and columns: out[part, M, N], part = program_id(2)."""
    tile = tl.program_id(0)
    part = tl.program_id(2)
    # the expert of this tile: so many have all of their tiles before it
    index = tl.arange(0, MOST)
    ends = tl.load(tile_ends + index, mask=index < EXPERTS, other=2**62)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    if expert < EXPERTS:
        before = tl.max(tl.where(index < expert, ends, 0), axis=0)
        first = tl.load(starts + expert) + (tile - before) * BM
        last = tl.load(starts + expert + 1)
        m = first + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        in_m, in_n = m < last, n < N
        source = tl.load(sources + m, mask=in_m, other=0) if GATHER else m
        x_rows = x + source * x_m
        w_rows = w + tl.cast(expert, tl.int64) * w_e + n.to(tl.int64) * w_n
        TRANSPOSED: tl.constexpr = SWAP and STEP != _EXPLICIT
        initial = tl.zeros((BN, BM) if TRANSPOSED else (BM, BN), tl.float32)
        total = subtree(
            x_rows, w_rows, in_m, in_n, x_k, w_k, part * LOCAL * segment, segment, 0, initial,
            LOCAL, STEP, SWAP, EVEN, BM, BN, BK, 1,
        )  # fmt: skip
        if TRANSPOSED:
            total = tl.trans(total)
        pointers = out + part.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
        tl.store(pointers, narrow(total, out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def grouped_linear(
    x: torch.Tensor, weights: torch.Tensor, groups: Groups, contract: LinearContract, *, gather: bool = True
) -> torch.Tensor:
    """Each choice's row times its expert's weight.

    Args:
        x: [tokens, inputs], of the contract's ``domain.input``; without ``gather`` [rows, inputs], by expert.
        weights: [experts, outputs, inputs], likewise.
        contract: of `linear` or `row_linear`, without bias.
        gather: whether a row is that of its token in ``x``.

    Returns:
        [rows, outputs], by expert, of the contract's ``rounding.output``.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device; inputs not a multiple of the segments.
        UnsupportedError: a contract without a kernel, or a matrix unit that this device lacks.
    """
    require_contract(contract, None)
    dtype, rows = DTYPES[contract.domain.input], groups.tokens.shape[0]
    require_tensor(x, "x", "tokens, inputs" if gather else f"rows={rows}, inputs", dtype)
    number = groups.starts.shape[0] - 1
    require_tensor(weights, "weights", f"experts={number}, outputs, inputs={x.shape[1]}", dtype)
    inputs, outputs, segments = x.shape[1], weights.shape[1], contract.partition.segments
    if inputs == 0 or inputs % segments:
        raise ValueError(f"x: {inputs} inputs cannot be cut into {segments} equal segments")
    out = torch.empty(rows, outputs, dtype=DTYPES[contract.rounding.output], device=x.device)
    if out.numel() == 0:
        return out
    plan = _schedule(contract, rows, number, outputs, inputs // segments, segments)
    counts = groups.starts.diff()
    tile_ends = torch.div(counts + (plan.tokens - 1), plan.tokens, rounding_mode="floor").cumsum(0)
    parts = segments // plan.local
    partial = out if parts == 1 else torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
    launch(
        grouped_kernel,
        # at most one tile of each expert is not full
        (rows // plan.tokens + min(number, rows), triton.cdiv(outputs, plan.outputs), parts),
        *(x, weights, groups.tokens, groups.starts, tile_ends, partial, rows, outputs, number),
        *(inputs // segments, *x.stride(), *weights.stride()),
        contract=contract,
        options={"num_warps": plan.warps, "num_stages": plan.stages},
        LOCAL=plan.local,
        STEP=step_of(contract),
        SWAP=plan.swap,
        EVEN=(inputs // segments) % plan.k == 0,
        GATHER=gather,
        BM=plan.tokens,
        BN=plan.outputs,
        BK=plan.k,
        MOST=triton.next_power_of_2(number),
    )
    if parts > 1:
        merge_parts(partial, out, None, contract)
    return out


def _schedule(contract: LinearContract, rows: int, experts: int, outputs: int, segment: int, segments: int) -> Schedule:
    """The dense product's schedule for the rows of one expert, read by pointers: rows of an expert are anywhere."""
    target, unit = current_target(), require_unit(contract)
    plan = schedules.schedule(target, unit, max(1, rows // experts), outputs, segment, segments)
    if plan.persistent:
        plan = schedules.pointers(plan)
    if plan.k_major:
        plan = Schedule(64, 64, 16)
    return replace(plan, local=min(plan.local, segments))
