# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""A row-parallel product, the residual add and the norm after it, with the bits of the three one after the other.

Where a product leaves its segments' sums in a workspace, the norm's kernel merges them itself: one launch fewer, and
the product's output is never written. With few tokens launches are what a step costs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath._tensors import TRITON_TYPES
from fastpath.backend import launch, require_tensor
from fastpath.collectives.merge import merge
from fastpath.primitives import narrow, widen
from fastpath.products.linear import linear_parts
from fastpath.rows.rms_norm import (
    RmsNormResult,
    inverse_rms,
    lanes_of,
    require_norm,
    rms_norm,
    round_epsilon,
    row_warps,
)
from reference.operators.rms_norm import RmsNormContract
from reference.operators.row_linear import RowLinearContract


@triton.jit
def merged_norm_kernel(
    parts, residual, weight, output, residual_output, epsilon, size,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """As `rms_norm_kernel` with a residual, of the rounded tree over float32 parts [COUNT, rows, COLUMNS]."""
    row = tl.program_id(0).to(tl.int64) * COLUMNS
    lane = tl.arange(0, WIDTH)
    squares = tl.zeros([WIDTH], tl.float32)
    chunks = ()
    weights = ()
    for start in tl.static_range(0, COLUMNS, WIDTH):  # all loads before the first store: a store holds up later loads
        inside = start + lane < COLUMNS
        product = narrow(merge(parts, row + start + lane, inside, tl.cast(size, tl.int64), 0, COUNT), DTYPE)
        weights = weights + (tl.load(weight + start + lane, mask=inside, other=0.0),)  # noqa: RUF005 - what Triton parses
        other = tl.load(residual + row + start + lane, mask=inside, other=0.0)
        value = narrow(widen(product) + widen(other), DTYPE)
        chunks = chunks + (value,)  # noqa: RUF005 - what Triton parses
        squares = tl.fma(widen(value), widen(value), squares)
    scale = inverse_rms(tl.reshape(squares, [1, WIDTH]), COLUMNS, epsilon, 1, WIDTH)
    for chunk in tl.static_range(len(chunks)):
        column = chunk * WIDTH + lane
        tl.store(residual_output + row + column, chunks[chunk], mask=column < COLUMNS)
        normalised = (widen(chunks[chunk]) * scale) * widen(weights[chunk])
        tl.store(output + row + column, narrow(normalised, DTYPE), mask=column < COLUMNS)


def row_linear_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    contract: RowLinearContract,
    norm: RmsNormContract,
) -> RmsNormResult:
    """:func:`fastpath.products.row_linear.row_linear`, then :func:`fastpath.rows.rms_norm.rms_norm` with ``residual``.

    Args:
        x: [tokens, inputs]. weight: [hidden, inputs]. residual: [tokens, hidden]. norm_weight: [hidden].

    Returns:
        The norm, and the sum of product and residual.

    Raises:
        As those two; ValueError where the two contracts have other formats.
    """
    dtype = require_norm(norm, epsilon)
    if str(norm.rounding.output) != str(contract.rounding.output):
        raise ValueError(f"norm: rounding.output must be {contract.rounding.output}, as the product's")
    parts = linear_parts(x, weight, contract)
    if parts.ndim == 2:
        return rms_norm(parts, norm_weight, epsilon, norm, residual)
    count, tokens, hidden = parts.shape
    require_tensor(norm_weight, "norm_weight", f"hidden={hidden}", dtype)
    require_tensor(residual, "residual", f"tokens={tokens}, hidden={hidden}", dtype)
    output, total = torch.empty_like(residual), torch.empty_like(residual)
    if output.numel():
        launch(
            merged_norm_kernel,
            (tokens,),
            *(parts, residual, norm_weight, output, total, round_epsilon(epsilon), tokens * hidden),
            contract=norm,
            options={"num_warps": min(8, 4 * row_warps(hidden, dtype))},
            COUNT=count,
            COLUMNS=hidden,
            WIDTH=lanes_of(hidden),
            DTYPE=TRITON_TYPES[dtype],
        )
    return RmsNormResult(output, total)
