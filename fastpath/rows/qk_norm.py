# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Normalisation of query and key heads before RoPE: `reference.operators.qk_norm` as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath._tensors import TRITON_TYPES, require_rows
from fastpath.backend import UnsupportedError, launch, require_tensor
from fastpath.primitives import div_rn, narrow, negative, pairs_tree, widen
from fastpath.rows.rms_norm import LANES, RmsNormGradients, inverse_rms, require_norm, round_epsilon, weight_gradient
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
    grad_output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float, contract: QkNormContract
) -> RmsNormGradients:
    """Gradients of ``x`` and ``weight``, in the order of `fastpath.rows.rms_norm.rms_norm_backward`, heads as rows.

    Args:
        grad_output, x: [tokens, heads, head_dim], contiguous.

    Raises:
        As :func:`qk_norm`.
    """
    dtype = require_norm(contract, epsilon)
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
    shape = (rows, head_dim)
    return RmsNormGradients(grad_x, weight_gradient(grad_output.view(shape), x.view(shape), scales, contract))


def require_head_dim(head_dim: int) -> None:
    """Refuse a head that is not a power of two of lanes.

    Raises:
        UnsupportedError: naming what is possible.
    """
    if not 16 <= head_dim <= LANES or head_dim & (head_dim - 1):
        raise UnsupportedError(f"head_dim: {head_dim} has no kernel; choose 16, 32, 64, 128 or 256")
