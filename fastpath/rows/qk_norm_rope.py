# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Normalisation and rotation of query or key heads in one pass: the bits of `qk_norm` followed by `rope`.

The normalised head is rounded to its format before it is rotated, as between the two operators. Its sum of squares is
the same tree of adjacent pairs: the two halves of a head meet at the root, neighbours at the leaves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath._tensors import INDEX_TYPES, TRITON_TYPES, accepted, require_rows
from fastpath.backend import launch, require_tensor
from fastpath.primitives import div_rn, narrow, negative, pairs_tree, rsqrt, widen
from fastpath.rows.qk_norm import require_head_dim
from fastpath.rows.rms_norm import require_norm, round_epsilon
from fastpath.rows.rope import IMPLEMENTED, RopeTable
from reference.operators.qk_norm import QkNormContract
from reference.operators.rope import RopeContract

#: Elements of one program.
TILE = 2048


@triton.jit
def qk_norm_rope_kernel(
    x, weight, second_weight, positions, cosines, sines, output, token_stride, table_rows, epsilon, first_heads,
    HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, NEIGHBOUR: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """ROWS heads of one token, [HEADS, 2 * HALF]; pairs (i, i + HALF), or (2i, 2i + 1) where NEIGHBOUR.

    Heads from ``first_heads`` on have ``second_weight``.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    pair = tl.arange(0, HALF)
    if NEIGHBOUR:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + HALF
    inside = (head < HEADS) & (pair < HALF)[None, :]
    place = head * (2 * HALF)
    a = widen(tl.load(x + token * token_stride + place + first[None, :], mask=inside, other=0.0))
    b = widen(tl.load(x + token * token_stride + place + second[None, :], mask=inside, other=0.0))
    position = tl.load(positions + token).to(tl.int64) + tl.zeros([HALF], tl.int64)
    known = (position >= 0) & (position < table_rows)
    cos = tl.load(cosines + position * HALF + pair, mask=known, other=float("nan"))[None, :]
    sin = tl.load(sines + position * HALF + pair, mask=known, other=float("nan"))[None, :]
    later = (head >= first_heads) & (pair >= 0)[None, :]
    w_first = widen(tl.where(later, tl.load(second_weight + first)[None, :], tl.load(weight + first)[None, :]))
    w_second = widen(tl.where(later, tl.load(second_weight + second)[None, :], tl.load(weight + second)[None, :]))
    zeros = tl.zeros([ROWS, HALF], tl.float32)
    a_squares = tl.fma(a, a, zeros)
    b_squares = tl.fma(b, b, zeros)
    if NEIGHBOUR:
        total = pairs_tree(a_squares + b_squares, ROWS, HALF)
    else:
        total = pairs_tree(a_squares, ROWS, HALF) + pairs_tree(b_squares, ROWS, HALF)
    scale = rsqrt(div_rn(total, tl.full([ROWS], 2 * HALF, tl.float32)) + epsilon)[:, None]
    a = widen(narrow((a * scale) * w_first, DTYPE))
    b = widen(narrow((b * scale) * w_second, DTYPE))
    target = output + token * (HEADS * 2 * HALF) + place
    tl.store(target + first[None, :], narrow(tl.fma(a, cos, negative(b) * sin), DTYPE), mask=inside)
    tl.store(target + second[None, :], narrow(tl.fma(b, cos, a * sin), DTYPE), mask=inside)


def qk_norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    table: RopeTable,
    epsilon: float,
    norm: QkNormContract,
    rotation: RopeContract,
) -> torch.Tensor:
    """Normalise every head of every token and rotate it by the angles of its position.

    A position outside the table gives NaN. Its gradient is that of `rope` and then of `qk_norm`, from ``x``. A recorded
    launch names the norm's contract.

    Args:
        x: bfloat16 or float32 as the contracts say, [tokens, heads, head_dim]; head_dim a power of two up to 256.
            Tokens may be strided (a slice of the packed projection).
        weight: [head_dim], the same dtype.
        positions: int32 or int64, [tokens], counted from the start of each sequence.
        table: from :func:`fastpath.rows.rope.rope_table`, every position.
        epsilon: added to the mean square; rounded to float32, there at least 2^-126.

    Returns:
        [tokens, heads, head_dim], contiguous, the same dtype.

    Raises:
        UnsupportedError: a contract field, format or head_dim without kernel.
        TypeError, ValueError: dtype, shape, layout or device of an argument; epsilon; contracts of two formats.
    """
    return _launch(x, weight, weight, positions, table, x.shape[1] if x.ndim == 3 else 0, epsilon, norm, rotation)


def packed_qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    table: RopeTable,
    heads: int,
    kv_heads: int,
    epsilon: float,
    norm: QkNormContract,
    rotation: RopeContract,
) -> torch.Tensor:
    """:func:`qk_norm_rope` of the query and the key heads of a packed projection, in one launch.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]: query, key and value heads.
        q_weight, k_weight: [head_dim] each.
        others: as :func:`qk_norm_rope`.

    Returns:
        [tokens, heads + kv_heads, head_dim], contiguous: queries, then keys.

    Raises:
        UnsupportedError, TypeError, ValueError: as :func:`qk_norm_rope`.
    """
    head_dim = q_weight.shape[0]
    if qkv.ndim != 2 or qkv.shape[1] != (heads + 2 * kv_heads) * head_dim:
        expected = f"[tokens, {heads} + 2 * {kv_heads} heads of {head_dim}]"
        raise ValueError(f"qkv: expected shape {expected}, got {list(qkv.shape)}")
    x = qkv[:, : (heads + kv_heads) * head_dim].unflatten(1, (heads + kv_heads, head_dim))
    return _launch(x, q_weight, k_weight, positions, table, heads, epsilon, norm, rotation)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    second_weight: torch.Tensor,
    positions: torch.Tensor,
    table: RopeTable,
    first_heads: int,
    epsilon: float,
    norm: QkNormContract,
    rotation: RopeContract,
) -> torch.Tensor:
    dtype = require_norm(norm, epsilon)
    if accepted(rotation, IMPLEMENTED) != dtype:
        raise ValueError(f"rotation: rounding.output must be {norm.rounding.output}, as the norm's")
    require_rows(x, "x", "tokens, heads, head_dim", dtype)
    tokens, heads, head_dim = x.shape
    require_head_dim(head_dim)
    require_tensor(weight, "weight", f"head_dim={head_dim}", dtype)
    require_tensor(second_weight, "k_weight", f"head_dim={head_dim}", dtype)
    require_tensor(positions, "positions", f"tokens={tokens}", *INDEX_TYPES)
    require_tensor(table.cos, "table.cos", f"positions, half={head_dim // 2}", torch.float32)
    require_tensor(table.sin, "table.sin", f"positions={table.cos.shape[0]}, half={head_dim // 2}", torch.float32)
    output = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        rows = min(triton.next_power_of_2(heads), TILE // head_dim)
        launch(
            qk_norm_rope_kernel,
            (tokens, triton.cdiv(heads, rows)),
            *(x, weight, second_weight, positions, table.cos, table.sin, output, x.stride(0), table.cos.shape[0]),
            *(round_epsilon(epsilon), first_heads),
            contract=norm,
            HEADS=heads,
            HALF=head_dim // 2,
            ROWS=rows,
            NEIGHBOUR=rotation.domain.pairing == "interleaved",
            DTYPE=TRITON_TYPES[dtype],
        )
    return output
