# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The sum of parts in one balanced tree: of segments of K by different programs, and of ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath.backend import launch
from fastpath.primitives import narrow, widen
from reference.contract.base import Contract


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
    """out[i] = tree over p of parts[p, i] (BIAS: + bias[i % N], one row of N a program), rounded once."""
    if BIAS:  # a row and a block of its columns: a division of integers would be reciprocals in the machine code
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        offset = tl.program_id(0).to(tl.int64) * N + column
        inside = column < N
    else:
        offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < size
    total = merge(parts, offset, inside, tl.cast(size, tl.int64), 0, COUNT)
    if BIAS:
        total += widen(tl.load(bias + column, mask=inside, other=0.0))
    tl.store(out + offset, narrow(total, out.dtype.element_ty), mask=inside)


def merge_parts(parts: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, contract: Contract) -> None:
    """Fill ``out`` [..., features] with the tree over float32 ``parts`` [count, ...] (+ bias), rounded once."""
    size, features, block = out.numel(), out.shape[-1], 1024
    flat, by_row = (triton.cdiv(size, block),), (size // max(features, 1), triton.cdiv(features, block))
    launch(
        merge_kernel,
        flat if bias is None else by_row,
        *(parts, out if bias is None else bias, out, size, features),
        contract=contract,
        COUNT=parts.shape[0],
        BIAS=bias is not None,
        BLOCK=block,
    )
