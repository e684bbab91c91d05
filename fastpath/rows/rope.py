# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rotary position embedding: `reference.operators.rope` as a Triton kernel; the gradient rotates backwards.

Cosines and sines come from the reference's correctly rounded table, never from the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from fastpath._tensors import INDEX_TYPES, TRITON_TYPES, accepted, require_rows
from fastpath.backend import launch, require_tensor
from fastpath.primitives import narrow, negative, widen
from reference.gradients import RopeBackwardContract
from reference.operators.rope import RopeContract
from reference.operators.rope import rope_table as reference_table
from reference.primitives import RopeParameters

IMPLEMENTED = (
    ("domain.pairing", ("halves", "interleaved")),
    ("precision.table", "float32"),
    ("rounding.product", "float32"),
    ("primitives.table", ("rlk", "float32-pow")),
    ("primitives.rotate", "fma_cos"),
)
IMPLEMENTED_GRADIENT = (("domain.pairing", ("halves", "interleaved")), ("primitives.rotate", "fma_cos"))
#: Pairs that one program rotates.
TILE = 2048


@triton.jit
def rope_kernel(
    x,
    positions,
    cosines,
    sines,
    output,
    token_stride,
    table_rows,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NEIGHBOUR: tl.constexpr,
    BACKWARD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rotate BLOCK_HEADS heads of one token: pairs (i, i + HALF), or (2i, 2i + 1) where NEIGHBOUR."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    pair = tl.arange(0, BLOCK_HALF)
    inside = (head < HEADS) & (pair < HALF)[None, :]
    if NEIGHBOUR:
        first = head * (2 * HALF) + 2 * pair[None, :]
        second = first + 1
    else:
        first = head * (2 * HALF) + pair[None, :]
        second = first + HALF
    a = widen(tl.load(x + token * token_stride + first, mask=inside, other=0.0))
    b = widen(tl.load(x + token * token_stride + second, mask=inside, other=0.0))
    position = tl.load(positions + token).to(tl.int64) + tl.zeros([BLOCK_HALF], tl.int64)
    known = (pair < HALF) & (position >= 0) & (position < table_rows)
    cos = tl.load(cosines + position * HALF + pair, mask=known, other=float("nan"))[None, :]
    sin = tl.load(sines + position * HALF + pair, mask=known, other=float("nan"))[None, :]
    if BACKWARD:
        sin = negative(sin)
    place = token * (HEADS * 2 * HALF)
    tl.store(output + place + first, narrow(tl.fma(a, cos, negative(b) * sin), DTYPE), mask=inside)
    tl.store(output + place + second, narrow(tl.fma(b, cos, a * sin), DTYPE), mask=inside)


class RopeTable(NamedTuple):
    """``cos`` and ``sin``, float32, [positions, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


@lru_cache(maxsize=8)
def rope_table(
    positions: int, head_dim: int, theta: float | RopeParameters, contract: RopeContract, device: torch.device | str
) -> RopeTable:
    """The reference's table for positions 0 .. ``positions`` - 1, on ``device``.

    Raises:
        TypeError, ValueError: as ``reference.operators.rope.rope_table``.
    """
    table = reference_table(np.arange(positions), head_dim, theta, contract)
    return RopeTable(*(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in (table.cos, table.sin)))


def rope(x: torch.Tensor, positions: torch.Tensor, table: RopeTable, contract: RopeContract) -> torch.Tensor:
    """Rotate every head of every token by the angles of its position.

    A position outside the table gives NaN: a device cannot raise without waiting for it.

    Args:
        x: bfloat16 or float32 as the contract says, [tokens, heads, head_dim]; tokens may be strided.
        positions: int32 or int64, [tokens], counted from the start of each sequence.
        table: from :func:`rope_table`, every position.

    Returns:
        [tokens, heads, head_dim], contiguous, the same dtype.

    Raises:
        UnsupportedError: a contract field or format without kernel.
        TypeError, ValueError: dtype, shape, layout or device of an argument.
    """
    return _rotate(x, positions, table, contract, accepted(contract, IMPLEMENTED), backward=False)


def rope_backward(
    grad_output: torch.Tensor, positions: torch.Tensor, table: RopeTable, contract: RopeBackwardContract
) -> torch.Tensor:
    """Gradient of the input, the rotation by the opposite angle: `reference.gradients.rope`.

    Arguments, result and errors as :func:`rope`.
    """
    dtype = accepted(contract, IMPLEMENTED_GRADIENT, "rounding.input")
    return _rotate(grad_output, positions, table, contract, dtype, backward=True)


def _rotate(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: RopeTable,
    contract: RopeContract | RopeBackwardContract,
    dtype: torch.dtype,
    backward: bool,
) -> torch.Tensor:
    require_rows(x, "x", "tokens, heads, head_dim", dtype)
    tokens, heads, head_dim = x.shape
    if head_dim % 2:
        raise ValueError(f"x: head_dim must be even, got {head_dim}")
    require_tensor(positions, "positions", f"tokens={tokens}", *INDEX_TYPES)
    require_tensor(table.cos, "table.cos", f"positions, half={head_dim // 2}", torch.float32)
    require_tensor(table.sin, "table.sin", f"positions={table.cos.shape[0]}, half={head_dim // 2}", torch.float32)
    output = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        width = triton.next_power_of_2(head_dim // 2)
        block_heads = min(triton.next_power_of_2(heads), max(1, TILE // width))
        launch(
            rope_kernel,
            (tokens, triton.cdiv(heads, block_heads)),
            *(x, positions, table.cos, table.sin, output, x.stride(0), table.cos.shape[0]),
            contract=contract,
            HEADS=heads,
            HALF=head_dim // 2,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=width,
            NEIGHBOUR=contract.domain.pairing == "interleaved",
            BACKWARD=backward,
            DTYPE=TRITON_TYPES[dtype],
        )
    return output
