# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Normalisation of query and key heads before RoPE: `reference.operators.qk_norm` as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath._tensors import TRITON_TYPES, require_rows
from fastpath.backend import UnsupportedError, launch, require_tensor
from fastpath.collectives.merge import merge_parts
from fastpath.primitives import div_rn, narrow, negative, pairs_tree, widen
from fastpath.rows.rms_norm import (
    LANES,
    RmsNormGradients,
    inverse_rms,
    require_norm,
    require_norm_gradient,
    round_epsilon,
    row_gradient,
)
from reference.gradients import QkNormBackwardContract, rank_segments
from reference.operators.qk_norm import QkNormContract

#: Elements of one program.
TILE = 2048


@triton.jit
def qk_norm_kernel(
    x,
    weight,
    output,
    rows,
    token_stride,
    epsilon,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """ROWS heads of [tokens, HEADS, COLUMNS], COLUMNS lanes each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None]
    place = (row // HEADS * token_stride + row % HEADS * COLUMNS)[:, None] + lane[None, :]
    value = widen(tl.load(x + place, mask=inside, other=0.0))
    squares = tl.fma(value, value, tl.zeros([ROWS, COLUMNS], tl.float32))
    scale = inverse_rms(squares, COLUMNS, epsilon, ROWS, COLUMNS)
    w = widen(tl.load(weight + lane))
    normalised = (value * scale[:, None]) * w[None, :]
    tl.store(output + row[:, None] * COLUMNS + lane[None, :], narrow(normalised, DTYPE), mask=inside)


@triton.jit
def qk_norm_backward_kernel(
    grad_output,
    x,
    weight,
    grad_x,
    scales,
    rows,
    epsilon,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Gradients of ROWS heads, and their scales for the gradient of the weight."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None]
    place = row[:, None] * COLUMNS + lane[None, :]
    value = widen(tl.load(x + place, mask=inside, other=0.0))
    slope = widen(tl.load(grad_output + place, mask=inside, other=0.0)) * widen(tl.load(weight + lane))[None, :]
    zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    scale = inverse_rms(tl.fma(value, value, zeros), COLUMNS, epsilon, ROWS, COLUMNS)
    total = pairs_tree(tl.fma(slope, value, zeros), ROWS, COLUMNS)
    pull = (div_rn(total, tl.full([ROWS], COLUMNS, tl.float32)) * scale) * scale
    dx = scale[:, None] * tl.fma(value, negative(pull)[:, None], slope)
    tl.store(grad_x + place, narrow(dx, DTYPE), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


def qk_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, contract: QkNormContract) -> torch.Tensor:
    """Normalise every head of every token.

    Args:
        x: bfloat16 or float32 as the contract says, [tokens, heads, head_dim]; head_dim a power of two up to 256.
            Tokens may be strided (a slice of the packed projection).
        weight: [head_dim], the same dtype.
        epsilon: added to the mean square; rounded to float32, there at least 2^-126.

    Returns:
        [tokens, heads, head_dim], contiguous, the same dtype.

    Raises:
        UnsupportedError: a contract field, format or head_dim without kernel.
        TypeError, ValueError: dtype, shape, layout or device of an argument; epsilon.
    """
    dtype = require_norm(contract, epsilon)
    require_rows(x, "x", "tokens, heads, head_dim", dtype)
    tokens, heads, head_dim = x.shape
    require_head_dim(head_dim)
    require_tensor(weight, "weight", f"head_dim={head_dim}", dtype)
    output = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        rows = tokens * heads
        launch(
            qk_norm_kernel,
            (triton.cdiv(rows * head_dim, TILE),),
            *(x, weight, output, rows, x.stride(0), round_epsilon(epsilon)),
            contract=contract,
            HEADS=heads,
            COLUMNS=head_dim,
            ROWS=TILE // head_dim,
            DTYPE=TRITON_TYPES[dtype],
        )
    return output


def qk_norm_backward(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    contract: QkNormBackwardContract,
    *,
    sequences: int = 1,
    sums: torch.Tensor | None = None,
) -> RmsNormGradients:
    """Gradient of ``x``, and the weight's by head, float32 [heads, head_dim]: `reference.gradients.qk_norm`.

    Args:
        grad_output, x: [tokens * sequences, heads, head_dim], contiguous, the tokens of several sequences side by side.
        sums: float32, [heads, head_dim]: the gradient of the weight is added to them, in place.

    Raises:
        As :func:`qk_norm`.
    """
    dtype = require_norm_gradient(contract, epsilon)
    require_tensor(x, "x", "tokens, heads, head_dim", dtype)
    tokens, heads, head_dim = x.shape
    require_head_dim(head_dim)
    require_tensor(grad_output, "grad_output", f"tokens={tokens}, heads={heads}, head_dim={head_dim}", dtype)
    require_tensor(weight, "weight", f"head_dim={head_dim}", dtype)
    rows = tokens * heads
    grad_x = torch.empty_like(x)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        launch(
            qk_norm_backward_kernel,
            (triton.cdiv(rows * head_dim, TILE),),
            *(grad_output, x, weight, grad_x, scales, rows, round_epsilon(epsilon)),
            contract=contract,
            COLUMNS=head_dim,
            ROWS=TILE // head_dim,
            DTYPE=TRITON_TYPES[dtype],
        )
    return RmsNormGradients(grad_x, row_gradient(grad_output, x, scales, contract, sequences, sums))


def merge_heads(sums: torch.Tensor, contract: QkNormBackwardContract, ranks: int = 1) -> torch.Tensor:
    """One rank's share of the weight's gradient, float32 [head_dim]: `reference.gradients.qk_norm.merge_heads`.

    Args:
        sums: float32, [heads, head_dim].

    Raises:
        TypeError, ValueError: dtype, shape, layout or device; segments that the ranks cannot share evenly.
    """
    require_tensor(sums, "sums", "heads, head_dim", torch.float32)
    segments = rank_segments(sums.shape[0], contract.partition.segments, ranks)
    parts = sums.view(segments, -1, sums.shape[1]).transpose(0, 1).contiguous()
    within = torch.empty(segments, sums.shape[1], dtype=torch.float32, device=sums.device)
    merge_parts(parts, within, None, contract)
    if segments == 1:
        return within[0]
    total = torch.empty(sums.shape[1], dtype=torch.float32, device=sums.device)
    merge_parts(within, total, None, contract)
    return total


def require_head_dim(head_dim: int) -> None:
    """Refuse a head that is not a power of two of lanes.

    Raises:
        UnsupportedError: naming what is possible.
    """
    if not 16 <= head_dim <= LANES or head_dim & (head_dim - 1):
        raise UnsupportedError(f"head_dim: {head_dim} has no kernel; choose 16, 32, 64, 128 or 256")
