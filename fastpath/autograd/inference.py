# mypy: disable-error-code="untyped-decorator"
"""Operators of an engine's forward pass without gradients, as `torch.library` operators: opaque to a compiler.

As in `fastpath.autograd.rows`, a contract travels as its canonical JSON.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpath.autograd.products import _contract
from fastpath.backend import DTYPES
from fastpath.products import linear as _linear
from fastpath.products import row_linear_norm as _row_linear_norm
from fastpath.rows import qk_norm_rope as _qk_norm_rope
from fastpath.rows.rope import RopeTable


@torch.library.custom_op("rlk::linear_bias", mutates_args=())
def _linear_op(x: Tensor, weight: Tensor, bias: Tensor | None, contract: str) -> Tensor:
    return _linear.linear(x, weight, _contract(contract), bias)


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, contract: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=DTYPES[_contract(contract).rounding.output])


@torch.library.custom_op("rlk::packed_qk_norm_rope", mutates_args=())
def _packed_op(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    epsilon: float,
    norm: str,
    rotation: str,
) -> Tensor:
    table, contracts = RopeTable(cos, sin), (_contract(norm), _contract(rotation))
    return _qk_norm_rope.packed_qk_norm_rope(
        qkv, q_weight, k_weight, positions, table, heads, kv_heads, epsilon, *contracts
    )


@_packed_op.register_fake
def _(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    epsilon: float,
    norm: str,
    rotation: str,
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], heads + kv_heads, q_weight.shape[0])


@torch.library.custom_op("rlk::row_linear_norm", mutates_args=())
def _row_linear_norm_op(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, epsilon: float, contract: str, norm: str
) -> tuple[Tensor, Tensor]:
    found = _row_linear_norm.row_linear_norm(
        x, weight, residual, norm_weight, epsilon, _contract(contract), _contract(norm)
    )
    assert found.residual is not None
    return found.output, found.residual


@_row_linear_norm_op.register_fake
def _(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, epsilon: float, contract: str, norm: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)
