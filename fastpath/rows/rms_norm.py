# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""Root-mean-square normalisation, alone or after a residual add: `reference.operators.rms_norm` as Triton kernels.

A warp takes a row: `WIDTH` lanes accumulate its chunks in ascending order, then merge by adjacent pairs. The row stays
in registers between the sum and the scaling, so that it is read once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from fastpath._tensors import TRITON_TYPES, accepted
from fastpath.backend import UnsupportedError, launch, require_fields, require_tensor
from fastpath.primitives import div_rn, narrow, negative, pairs_tree, rsqrt, widen
from reference.contract.base import Contract
from reference.operators.rms_norm import RmsNormContract

if TYPE_CHECKING:
    from reference.gradients import LinearBackwardContract, QkNormBackwardContract, RmsNormBackwardContract

#: What the norms of this package compute.
IMPLEMENTED_NORM = (
    ("order.sum", "lanes-tree-256"),
    ("order.product", "(x*r)*w"),
    ("precision.variance", "float32"),
    ("rounding.normalised", "float32"),
    ("primitives.square", "fma"),
    ("primitives.mean", "divide"),
    ("primitives.rsqrt", "rlk"),
)
#: What their gradients compute.
IMPLEMENTED_GRADIENT = (
    ("order.sum", "lanes-tree-256"),
    ("primitives.mean", "divide"),
    ("primitives.rsqrt", "rlk"),
)
LANES = 256
#: Longest row: its chunks are unrolled, and longer code takes minutes to compile.
MOST_COLUMNS = 16384


@triton.jit
def inverse_rms(squares, COLUMNS: tl.constexpr, epsilon, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS] of rsqrt(sum / COLUMNS + epsilon) from lane sums [ROWS, WIDTH]."""
    count = tl.full([ROWS], COLUMNS, tl.float32)
    return rsqrt(div_rn(pairs_tree(squares, ROWS, WIDTH), count) + epsilon)


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    output,
    residual_output,
    epsilon,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One row: s = x + residual (rounded, and handed on), output = s * rsqrt(mean(s^2) + epsilon) * weight."""
    row = tl.program_id(0).to(tl.int64) * COLUMNS
    lane = tl.arange(0, WIDTH)
    squares = tl.zeros([WIDTH], tl.float32)
    chunks = ()
    weights = ()
    for start in tl.static_range(0, COLUMNS, WIDTH):  # all loads before the first store: a store holds up later loads
        inside = start + lane < COLUMNS
        value = tl.load(x + row + start + lane, mask=inside, other=0.0)
        weights = weights + (tl.load(weight + start + lane, mask=inside, other=0.0),)  # noqa: RUF005 - what Triton parses
        if HAS_RESIDUAL:
            other = tl.load(residual + row + start + lane, mask=inside, other=0.0)
            value = narrow(widen(value) + widen(other), DTYPE)
        chunks = chunks + (value,)  # noqa: RUF005 - what Triton parses
        squares = tl.fma(widen(value), widen(value), squares)
    scale = inverse_rms(tl.reshape(squares, [1, WIDTH]), COLUMNS, epsilon, 1, WIDTH)
    for chunk in tl.static_range(len(chunks)):
        column = chunk * WIDTH + lane
        if HAS_RESIDUAL:
            tl.store(residual_output + row + column, chunks[chunk], mask=column < COLUMNS)
        normalised = (widen(chunks[chunk]) * scale) * widen(weights[chunk])
        tl.store(output + row + column, narrow(normalised, DTYPE), mask=column < COLUMNS)


@triton.jit
def rms_norm_backward_kernel(
    grad_output,
    grad_residual,
    x,
    weight,
    grad_x,
    scales,
    epsilon,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Gradient of one row, and its scale r for the gradient of the weight."""
    index = tl.program_id(0).to(tl.int64)
    row = index * COLUMNS
    lane = tl.arange(0, WIDTH)
    squares = tl.zeros([WIDTH], tl.float32)
    products = tl.zeros([WIDTH], tl.float32)
    values = ()
    slopes = ()
    others = ()
    for start in tl.static_range(0, COLUMNS, WIDTH):
        inside = start + lane < COLUMNS
        value = widen(tl.load(x + row + start + lane, mask=inside, other=0.0))
        dy = widen(tl.load(grad_output + row + start + lane, mask=inside, other=0.0))
        slope = dy * widen(tl.load(weight + start + lane, mask=inside, other=0.0))
        values = values + (value,)  # noqa: RUF005 - what Triton parses
        slopes = slopes + (slope,)  # noqa: RUF005 - what Triton parses
        if HAS_RESIDUAL:
            other = tl.load(grad_residual + row + start + lane, mask=inside, other=0.0)
            others = others + (other,)  # noqa: RUF005 - what Triton parses
        squares = tl.fma(value, value, squares)
        products = tl.fma(slope, value, products)
    scale = inverse_rms(tl.reshape(squares, [1, WIDTH]), COLUMNS, epsilon, 1, WIDTH)
    tl.store(scales + index + tl.arange(0, 1), scale)
    mean = div_rn(pairs_tree(tl.reshape(products, [1, WIDTH]), 1, WIDTH), tl.full([1], COLUMNS, tl.float32))
    pull = (mean * scale) * scale
    for chunk in tl.static_range(len(values)):
        column = chunk * WIDTH + lane
        dx = scale * tl.fma(values[chunk], negative(pull), slopes[chunk])
        if HAS_RESIDUAL:
            dx = dx + widen(others[chunk])
        tl.store(grad_x + row + column, narrow(dx, DTYPE), mask=column < COLUMNS)


@triton.jit
def row_gradient_kernel(
    grad_output, x, scales, partials, tokens, streams,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """partials[block, stream]: sum of dy * (x * r) over ROWS tokens of a stream, a chain of FMA in ascending order.

    Rows are [tokens, streams]: a stream is one head of one sequence. BIAS: the sum of dy alone.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.program_id(0) % streams
    first = tl.program_id(0) // streams * ROWS
    total = tl.zeros([BLOCK], tl.float32)
    for token in range(first, tl.minimum(first + ROWS, tokens)):
        row = tl.cast(token, tl.int64) * streams + stream
        dy = widen(tl.load(grad_output + row * COLUMNS + column, mask=column < COLUMNS, other=0.0))
        if BIAS:
            total = tl.fma(dy, 1.0, total)
        else:
            value = widen(tl.load(x + row * COLUMNS + column, mask=column < COLUMNS, other=0.0))
            total = tl.fma(dy, value * tl.load(scales + row), total)
    tl.store(partials + tl.program_id(0).to(tl.int64) * COLUMNS + column, total, mask=column < COLUMNS)


@triton.jit
def add_partials_kernel(
    partials, sums, blocks, sequences, HEADS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """sums[head] += the partial sums of a head, sequence after sequence, block after block."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    total = tl.load(sums + head * COLUMNS + column, mask=column < COLUMNS, other=0.0)
    for sequence in range(sequences):
        for block in range(blocks):
            row = ((tl.cast(block, tl.int64) * sequences + sequence) * HEADS + head) * COLUMNS
            total += tl.load(partials + row + column, mask=column < COLUMNS, other=0.0)
    tl.store(sums + head * COLUMNS + column, total, mask=column < COLUMNS)


class RmsNormResult(NamedTuple):
    """``output`` and, of the form with a residual, ``residual``: the sum that the next block adds to (else None)."""

    output: torch.Tensor
    residual: torch.Tensor | None


class RmsNormGradients(NamedTuple):
    """Gradients of ``x`` (and of the residual: the same), rounded; and of ``weight``, float32 sums, not rounded."""

    x: torch.Tensor
    weight: torch.Tensor


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    contract: RmsNormContract,
    residual: torch.Tensor | None = None,
) -> RmsNormResult:
    """Normalise each row of ``x``, or of ``x + residual``.

    Args:
        x: bfloat16 or float32 as the contract says, [tokens, hidden], hidden up to 16384.
        weight: [hidden], the same dtype.
        epsilon: added to the mean square; rounded to float32, there at least 2^-126.
        residual: [tokens, hidden].

    Raises:
        UnsupportedError: a contract field, format or size without kernel.
        TypeError, ValueError: dtype, shape, layout or device of an argument; epsilon.
    """
    dtype = require_norm(contract, epsilon)
    require_residual(contract)
    require_tensor(x, "x", "tokens, hidden", dtype)
    tokens, hidden = x.shape
    require_tensor(weight, "weight", f"hidden={hidden}", dtype)
    if residual is not None:
        require_tensor(residual, "residual", f"tokens={tokens}, hidden={hidden}", dtype)
    output = torch.empty_like(x)
    residual_output = None if residual is None else torch.empty_like(x)
    if x.numel():
        launch(
            rms_norm_kernel,
            (tokens,),
            *(x, x if residual is None else residual, weight, output),
            *(output if residual_output is None else residual_output, round_epsilon(epsilon)),
            contract=contract,
            options={"num_warps": min(8, 2 * row_warps(hidden, dtype)) if hidden >= 2048 else 1},
            COLUMNS=hidden,
            WIDTH=lanes_of(hidden),
            HAS_RESIDUAL=residual is not None,
            DTYPE=TRITON_TYPES[dtype],
        )
    return RmsNormResult(output, residual_output)


def rms_norm_backward(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    contract: RmsNormBackwardContract,
    grad_residual: torch.Tensor | None = None,
    *,
    sequences: int = 1,
    sums: torch.Tensor | None = None,
) -> RmsNormGradients:
    """Gradients of the norm: `reference.gradients.rms_norm`. No atomics, every sum in a fixed order.

    Args:
        grad_output: [tokens * sequences, hidden], the tokens of several sequences side by side.
        x: what was normalised: ``x``, or the residual sum that :func:`rms_norm` handed on.
        grad_residual: gradient of the residual sum, like ``x``.
        sums: float32, [hidden]: the gradient of the weight is added to them, in place.

    Raises:
        As :func:`rms_norm`.
    """
    dtype = require_norm_gradient(contract, epsilon)
    require_tensor(x, "x", "tokens, hidden", dtype)
    rows, hidden = x.shape
    require_tensor(grad_output, "grad_output", f"tokens={rows}, hidden={hidden}", dtype)
    require_tensor(weight, "weight", f"hidden={hidden}", dtype)
    if grad_residual is not None:
        require_tensor(grad_residual, "grad_residual", f"tokens={rows}, hidden={hidden}", dtype)
    grad_x = torch.empty_like(x)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel():
        launch(
            rms_norm_backward_kernel,
            (rows,),
            *(grad_output, x if grad_residual is None else grad_residual, x, weight, grad_x, scales),
            round_epsilon(epsilon),
            contract=contract,
            options={"num_warps": min(8, 4 * row_warps(hidden, dtype))},
            COLUMNS=hidden,
            WIDTH=lanes_of(hidden),
            HAS_RESIDUAL=grad_residual is not None,
            DTYPE=TRITON_TYPES[dtype],
        )
    shape = (rows, 1, hidden)
    found = row_gradient(grad_output.view(shape), x.view(shape), scales, contract, sequences, sums)
    return RmsNormGradients(grad_x, found[0])


def row_gradient(
    grad_output: torch.Tensor,
    x: torch.Tensor | None,
    scales: torch.Tensor | None,
    contract: RmsNormBackwardContract | QkNormBackwardContract | LinearBackwardContract,
    sequences: int = 1,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the weight of a norm, or (``x`` None) of a bias: `reference.gradients._sums.row_gradient`.

    Args:
        grad_output, x: [tokens * sequences, heads, columns], contiguous; ``scales`` [rows], float32.
        sums: float32, [heads, columns] (or [columns]), to which it is added in place; None begins at zero.

    Returns:
        float32, [heads, columns].

    Raises:
        TypeError, ValueError: of ``sums``; rows that the sequences do not share.
    """
    rows, heads, columns = grad_output.shape
    if sequences < 1 or rows % sequences:
        raise ValueError(f"sequences: {sequences} sequences do not share {rows} rows")
    if sums is None:
        sums = torch.zeros(heads, columns, dtype=torch.float32, device=grad_output.device)
    sums = sums.view(heads, columns)
    require_tensor(sums, "sums", f"heads={heads}, columns={columns}", torch.float32)
    tokens, streams, block = rows // sequences, sequences * heads, contract.partition.rows
    blocks = triton.cdiv(tokens, block)
    width = min(256, triton.next_power_of_2(columns))
    tiles = triton.cdiv(columns, width)
    if rows:
        partials = torch.empty(blocks, streams, columns, dtype=torch.float32, device=grad_output.device)
        operands = (grad_output, grad_output if x is None else x, partials if scales is None else scales)
        sizes = {"COLUMNS": columns, "BLOCK": width}
        launch(
            row_gradient_kernel,
            (blocks * streams, tiles),
            *(*operands, partials, tokens, streams),
            contract=contract,
            **sizes,
            ROWS=block,
            BIAS=x is None,
        )
        launch(
            add_partials_kernel,
            (tiles, heads),
            *(partials, sums, blocks, sequences),
            contract=contract,
            **sizes,
            HEADS=heads,
        )
    return sums


@lru_cache(maxsize=64)
def require_residual(contract: RmsNormContract) -> None:
    """Refuse a residual sum in another format than the output's.

    Raises:
        UnsupportedError: naming the field.
    """
    for path in ("rounding.sum", "rounding.residual"):
        require_fields(contract, {path: contract.rounding.output})


def require_norm(contract: Contract, epsilon: float) -> torch.dtype:
    """The dtype of a norm's contract, if its kernels implement it.

    Raises:
        UnsupportedError, ValueError: contract; epsilon (one Triton release takes wrong roots of subnormals).
    """
    if not 2.0**-126 <= round_epsilon(epsilon) < float("inf"):
        raise ValueError(f"epsilon: must be finite and at least 2^-126, got {epsilon!r}")
    return accepted(contract, IMPLEMENTED_NORM)


def require_norm_gradient(contract: Contract, epsilon: float) -> torch.dtype:
    """The dtype of a norm's gradient contract, if its kernels implement it.

    Raises:
        UnsupportedError, ValueError: as :func:`require_norm`.
    """
    if not 2.0**-126 <= round_epsilon(epsilon) < float("inf"):
        raise ValueError(f"epsilon: must be finite and at least 2^-126, got {epsilon!r}")
    return accepted(contract, IMPLEMENTED_GRADIENT, "rounding.input")


def round_epsilon(epsilon: float) -> float:
    """``epsilon`` rounded to float32."""
    return float(np.float32(epsilon))


def lanes_of(columns: int) -> int:
    """Lanes of a row sum: 256, or the largest power of two that is not above the length of the row."""
    return min(LANES, 1 << (columns.bit_length() - 1))


def row_warps(columns: int, dtype: torch.dtype) -> int:
    """Warps per row: enough to hold the row in 64 registers a thread.

    Raises:
        UnsupportedError: a row longer than ``MOST_COLUMNS``.
    """
    if columns > MOST_COLUMNS:
        raise UnsupportedError(f"hidden: rows of {columns} do not fit the registers; at most {MOST_COLUMNS}")
    return max(1, min(8, int(triton.next_power_of_2(columns * dtype.itemsize)) // 8192))
