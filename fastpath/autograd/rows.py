# mypy: disable-error-code="untyped-decorator"
"""The row operators and attention as `torch.library` operators with shapes for tracing and gradients for training.

`torch.ops.rlk.*` are what torch.compile and graph capture see. A contract travels as its canonical JSON, so that a
traced graph names it. The functions below take contracts; what they raise is what the operator's own module raises.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastpath.attention import attention as _attention
from fastpath.attention.attention_backward import attention_backward
from fastpath.products.linear import narrow_to
from fastpath.rows import embedding as _embedding
from fastpath.rows import qk_norm as _qk_norm
from fastpath.rows import residual_add as _residual_add
from fastpath.rows import rms_norm as _rms_norm
from fastpath.rows import rope as _rope
from fastpath.rows import swiglu as _swiglu
from reference.contract.base import Contract, from_json
from reference.gradients import gradient_contract
from reference.operators.attention import AttentionContract
from reference.operators.embedding import EmbeddingContract
from reference.operators.qk_norm import QkNormContract
from reference.operators.residual_add import ResidualAddContract
from reference.operators.rms_norm import RmsNormContract
from reference.operators.rope import RopeContract
from reference.operators.swiglu import SwigluContract


@lru_cache(maxsize=256)
def _contract(text: str) -> Any:
    return from_json(text)


@lru_cache(maxsize=256)
def _gradient(text: str) -> Any:
    """The contract of the gradient of the operator whose contract is given."""
    return gradient_contract(from_json(text))


@torch.compiler.assume_constant_result
def _text(contract: Contract) -> str:
    return _canonical(contract)


@lru_cache(maxsize=256)
def _canonical(contract: Contract) -> str:
    return contract.to_json()


# ---- rms_norm ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("rlk::rms_norm", mutates_args=())
def _rms_norm_op(x: Tensor, weight: Tensor, epsilon: float, contract: str) -> Tensor:
    return _rms_norm.rms_norm(x, weight, epsilon, _contract(contract)).output


@torch.library.custom_op("rlk::rms_norm_backward", mutates_args=())
def _rms_norm_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, contract: str, grad_residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    own = _gradient(contract)
    found = _rms_norm.rms_norm_backward(grad, x, weight, epsilon, own, grad_residual)
    return found.x, narrow_to(found.weight, weight.dtype, own)


@torch.library.custom_op("rlk::rms_norm_residual", mutates_args=())
def _rms_norm_residual_op(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, contract: str
) -> tuple[Tensor, Tensor]:
    found = _rms_norm.rms_norm(x, weight, epsilon, _contract(contract), residual)
    assert found.residual is not None
    return found.output, found.residual


@_rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float, contract: str) -> Tensor:
    return torch.empty_like(x)


@_rms_norm_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, contract: str, grad_residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@_rms_norm_residual_op.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, contract: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, ctx.epsilon, ctx.contract = inputs
    ctx.save_for_backward(x, weight)


def _norm_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    found = _rms_norm_backward_op(grad.contiguous(), x, weight, ctx.epsilon, ctx.contract, None)
    return *found, None, None


def _keep_residual_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, ctx.epsilon, ctx.contract = inputs
    ctx.save_for_backward(output[1], weight)


def _residual_norm_gradients(ctx: Any, grad: Tensor, grad_residual: Tensor) -> tuple[Any, ...]:
    total, weight = ctx.saved_tensors
    found = _rms_norm_backward_op(
        grad.contiguous(), total, weight, ctx.epsilon, ctx.contract, grad_residual.contiguous()
    )
    return found[0], found[0], found[1], None, None


_rms_norm_op.register_autograd(_norm_gradients, setup_context=_keep_norm)
_rms_norm_residual_op.register_autograd(_residual_norm_gradients, setup_context=_keep_residual_norm)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, contract: RmsNormContract) -> Tensor:
    """:func:`fastpath.rows.rms_norm.rms_norm` without residual, differentiable: [tokens, hidden]."""
    return _rms_norm_op(x, weight, epsilon, _text(contract))


def rms_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, contract: RmsNormContract
) -> tuple[Tensor, Tensor]:
    """:func:`fastpath.rows.rms_norm.rms_norm` of ``x + residual``, and that sum, differentiable."""
    output, total = _rms_norm_residual_op(x, residual, weight, epsilon, _text(contract))
    return output, total


# ---- qk_norm -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("rlk::qk_norm", mutates_args=())
def _qk_norm_op(x: Tensor, weight: Tensor, epsilon: float, contract: str) -> Tensor:
    return _qk_norm.qk_norm(x, weight, epsilon, _contract(contract))


@torch.library.custom_op("rlk::qk_norm_backward", mutates_args=())
def _qk_norm_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, contract: str
) -> tuple[Tensor, Tensor]:
    own = _gradient(contract)
    found = _qk_norm.qk_norm_backward(grad, x.contiguous(), weight, epsilon, own)
    return found.x, narrow_to(_qk_norm.merge_heads(found.weight, own), weight.dtype, own)


@_qk_norm_op.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float, contract: str) -> Tensor:
    return x.new_empty(x.shape)


@_qk_norm_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, contract: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _head_norm_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    return *_qk_norm_backward_op(grad.contiguous(), x, weight, ctx.epsilon, ctx.contract), None, None


_qk_norm_op.register_autograd(_head_norm_gradients, setup_context=_keep_norm)


def qk_norm(x: Tensor, weight: Tensor, epsilon: float, contract: QkNormContract) -> Tensor:
    """:func:`fastpath.rows.qk_norm.qk_norm`, differentiable: [tokens, heads, head_dim]."""
    return _qk_norm_op(x, weight, epsilon, _text(contract))


# ---- rope ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("rlk::rope", mutates_args=())
def _rope_op(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, contract: str, backward: bool) -> Tensor:
    table = _rope.RopeTable(cos, sin)
    if backward:
        return _rope.rope_backward(x, positions, table, _gradient(contract))
    return _rope.rope(x, positions, table, _contract(contract))


@_rope_op.register_fake
def _(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, contract: str, backward: bool) -> Tensor:
    return x.new_empty(x.shape)


def _keep_rope(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, cos, sin, ctx.contract, ctx.backward = inputs
    ctx.save_for_backward(positions, cos, sin)


def _rope_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    back = _rope_op(grad.contiguous(), *ctx.saved_tensors, ctx.contract, not ctx.backward)
    return back, None, None, None, None, None


_rope_op.register_autograd(_rope_gradients, setup_context=_keep_rope)


def rope(x: Tensor, positions: Tensor, table: _rope.RopeTable, contract: RopeContract) -> Tensor:
    """:func:`fastpath.rows.rope.rope`, differentiable: [tokens, heads, head_dim]."""
    return _rope_op(x, positions, table.cos, table.sin, _text(contract), False)


# ---- swiglu, residual_add, embedding -------------------------------------------------------------------------------


@torch.library.custom_op("rlk::swiglu", mutates_args=())
def _swiglu_op(gate: Tensor, up: Tensor, contract: str) -> Tensor:
    return _swiglu.swiglu(gate, up, _contract(contract))


@torch.library.custom_op("rlk::swiglu_backward", mutates_args=())
def _swiglu_backward_op(grad: Tensor, gate: Tensor, up: Tensor, contract: str) -> tuple[Tensor, Tensor]:
    return _swiglu.swiglu_backward(grad, gate, up, _gradient(contract))


@torch.library.custom_op("rlk::residual_add", mutates_args=())
def _residual_add_op(x: Tensor, residual: Tensor, contract: str) -> Tensor:
    return _residual_add.residual_add(x, residual, _contract(contract))


@torch.library.custom_op("rlk::embedding", mutates_args=())
def _embedding_op(token_ids: Tensor, table: Tensor, contract: str) -> Tensor:
    return _embedding.embedding(token_ids, table, _contract(contract))


@torch.library.custom_op("rlk::embedding_backward", mutates_args=())
def _embedding_backward_op(grad: Tensor, token_ids: Tensor, vocabulary: int, contract: str) -> Tensor:
    own = _gradient(contract)
    return narrow_to(_embedding.embedding_backward(grad, token_ids, vocabulary, own), grad.dtype, own)


@_swiglu_op.register_fake
def _(gate: Tensor, up: Tensor, contract: str) -> Tensor:
    return gate.new_empty(gate.shape)


@_swiglu_backward_op.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, contract: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad), torch.empty_like(grad)


@_residual_add_op.register_fake
def _(x: Tensor, residual: Tensor, contract: str) -> Tensor:
    return torch.empty_like(x)


@_embedding_op.register_fake
def _(token_ids: Tensor, table: Tensor, contract: str) -> Tensor:
    return table.new_empty(token_ids.shape[0], table.shape[1])


@_embedding_backward_op.register_fake
def _(grad: Tensor, token_ids: Tensor, vocabulary: int, contract: str) -> Tensor:
    return grad.new_empty(vocabulary, grad.shape[1])


def _keep_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.contract = inputs
    ctx.save_for_backward(gate, up)


def _swiglu_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *_swiglu_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.contract), None


def _keep_embedding(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    token_ids, table, ctx.contract = inputs
    ctx.vocabulary = table.shape[0]
    ctx.save_for_backward(token_ids)


def _embedding_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return None, _embedding_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.vocabulary, ctx.contract), None


_swiglu_op.register_autograd(_swiglu_gradients, setup_context=_keep_swiglu)
_residual_add_op.register_autograd(lambda ctx, grad: (grad, grad, None))
_embedding_op.register_autograd(_embedding_gradients, setup_context=_keep_embedding)


def swiglu(gate: Tensor, up: Tensor, contract: SwigluContract) -> Tensor:
    """:func:`fastpath.rows.swiglu.swiglu`, differentiable: [tokens, features]."""
    return _swiglu_op(gate, up, _text(contract))


def residual_add(x: Tensor, residual: Tensor, contract: ResidualAddContract) -> Tensor:
    """:func:`fastpath.rows.residual_add.residual_add`, differentiable: [tokens, hidden]."""
    return _residual_add_op(x, residual, _text(contract))


def embedding(token_ids: Tensor, table: Tensor, contract: EmbeddingContract) -> Tensor:
    """:func:`fastpath.rows.embedding.embedding`, differentiable in ``table``: [tokens, hidden]."""
    return _embedding_op(token_ids, table, _text(contract))


# ---- attention -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("rlk::attention", mutates_args=())
def _attention_op(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, most: list[int], contract: str
) -> tuple[Tensor, Tensor, Tensor]:
    kv = _attention.Packed(k, v, key_starts)
    found = _attention.attention(q, query_starts, most[0], kv, _contract(contract), save=True)
    assert found.maxima is not None and found.sums is not None
    return found.output, found.maxima, found.sums


@torch.library.custom_op("rlk::attention_backward", mutates_args=())
def _attention_backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    result: list[Tensor],
    most: list[int],
    contract: str,
) -> tuple[Tensor, Tensor, Tensor]:
    kv, kept = _attention.Packed(k, v, key_starts), _attention.AttentionResult(*result)
    found = attention_backward(grad, q, query_starts, most[0], kv, most[1], kept, _gradient(contract))
    return found.q, found.k, found.v


@torch.library.custom_op("rlk::paged_attention", mutates_args=())
def _paged_attention_op(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    most_queries: int,
    contract: str,
) -> Tensor:
    pages = _attention.Pages(keys, values, block_tables, lengths)
    return _attention.attention(q, query_starts, most_queries, pages, _contract(contract)).output


@_attention_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, most: list[int], contract: str
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
    return q.new_empty(q.shape), *statistics


@_attention_backward_op.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    result: list[Tensor],
    most: list[int],
    contract: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), torch.empty_like(k), torch.empty_like(v)


@_paged_attention_op.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    most_queries: int,
    contract: str,
) -> Tensor:
    return q.new_empty(q.shape)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, ctx.most, ctx.contract = inputs
    ctx.save_for_backward(*operands, *output)


def _attention_gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    *operands, output, maxima, sums = ctx.saved_tensors
    result = [output, maxima, sums]
    found = _attention_backward_op(grad.contiguous(), *operands, result, ctx.most, ctx.contract)
    return *found, None, None, None, None


_attention_op.register_autograd(_attention_gradients, setup_context=_keep_attention)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    contract: AttentionContract,
) -> Tensor:
    """:func:`fastpath.attention.attention` over packed sequences, differentiable: [tokens, heads, head_dim]."""
    most = [most_queries, most_keys]
    output: Tensor = _attention_op(q, k, v, query_starts, key_starts, most, _text(contract))[0]
    return output


def paged_attention(
    q: Tensor, query_starts: Tensor, most_queries: int, pages: _attention.Pages, contract: AttentionContract
) -> Tensor:
    """:func:`fastpath.attention.attention` through pages, for rollout: no gradient."""
    cache = (pages.keys, pages.values, pages.block_tables, pages.lengths)
    output: Tensor = _paged_attention_op(q, *cache, query_starts, most_queries, _text(contract))
    return output
