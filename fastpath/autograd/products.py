# mypy: disable-error-code="untyped-decorator"
"""Matrix products and the fused head as `torch.library` operators, as `fastpath.autograd` has the others.

`torch.ops.rlk.*` are what torch.compile and graph capture see. A contract travels as its canonical JSON, so that a
traced graph names it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastpath.backend import DTYPES
from fastpath.products import linear as _linear
from fastpath.products import lm_head as _head
from reference.contract.base import Contract, from_json
from reference.gradients import gradient_contract
from reference.operators.linear import LinearContract
from reference.operators.lm_head import LmHeadContract
from reference.operators.logprob import LogprobContract
from reference.operators.logsumexp import LogsumexpContract


@lru_cache(maxsize=256)
def _contract(text: str) -> Any:
    return from_json(text)


@lru_cache(maxsize=256)
def _text(contract: Contract) -> str:
    return contract.to_json()


# ---- linear and row_linear -----------------------------------------------------------------------------------------


@torch.library.custom_op("rlk::linear", mutates_args=())
def _linear_op(x: Tensor, weight: Tensor, contract: str) -> Tensor:
    return _linear.linear(x, weight, _contract(contract))


@torch.library.custom_op("rlk::linear_input_gradient", mutates_args=())
def _input_gradient_op(grad: Tensor, weight: Tensor, contract: str) -> Tensor:
    own: Any = gradient_contract(_contract(contract))
    return _linear.input_gradient(grad, weight, own)


@torch.library.custom_op("rlk::linear_weight_gradient", mutates_args=())
def _weight_gradient_op(grad: Tensor, x: Tensor, contract: str) -> Tensor:
    own: Any = gradient_contract(_contract(contract))
    return _linear.narrow_to(_linear.weight_gradient(grad[None], x[None], own), x.dtype, own)


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, contract: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=DTYPES[_contract(contract).rounding.output])


@_input_gradient_op.register_fake
def _(grad: Tensor, weight: Tensor, contract: str) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[1])


@_weight_gradient_op.register_fake
def _(grad: Tensor, x: Tensor, contract: str) -> Tensor:
    return grad.new_empty(grad.shape[1], x.shape[1])


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.contract = inputs
    ctx.save_for_backward(x, weight)


def _linear_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    grad = grad.contiguous()
    of_x = _input_gradient_op(grad, weight, ctx.contract) if ctx.needs_input_grad[0] else None
    of_weight = _weight_gradient_op(grad, x, ctx.contract) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, None


_linear_op.register_autograd(_linear_gradients, setup_context=_keep_operands)


def linear(x: Tensor, weight: Tensor, contract: LinearContract) -> Tensor:
    """`products.linear.linear` (or one rank of row_linear) without bias, differentiable: [tokens, outputs]."""
    return _linear_op(x, weight, _text(contract))


# ---- lm_head + logsumexp + logprob ---------------------------------------------------------------------------------


@torch.library.custom_op("rlk::lm_head_logprob", mutates_args=())
def _logprob_op(
    x: Tensor, weight: Tensor, targets: Tensor, head: str, lse: str, logprob: str, logits_bytes: int
) -> tuple[Tensor, Tensor]:
    contracts = (_contract(head), _contract(lse), _contract(logprob))
    chosen, parts = _head.lm_head_logprob(x, weight, targets, *contracts, logits_bytes)
    return chosen, parts.value


@torch.library.custom_op("rlk::lm_head_logprob_backward", mutates_args=())
def _logprob_backward_op(
    upstream: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    value: Tensor,
    head: str,
    lse: str,
    logprob: str,
    logits_bytes: int,
) -> tuple[Tensor, Tensor]:
    contracts = (_contract(head), _contract(lse), _contract(logprob))
    return _head.lm_head_logprob_gradient(upstream, x, weight, targets, value, *contracts, logits_bytes)


@_logprob_op.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, head: str, lse: str, logprob: str, logits_bytes: int
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0],)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


@_logprob_backward_op.register_fake
def _(
    upstream: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    value: Tensor,
    head: str,
    lse: str,
    logprob: str,
    logits_bytes: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_head(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, targets, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, targets, output[1])
    ctx.mark_non_differentiable(output[1])


def _head_gradients(ctx: Any, upstream: Tensor, _: Any) -> tuple[Any, ...]:
    of_x, of_weight = _logprob_backward_op(upstream.contiguous(), *ctx.saved_tensors, *ctx.rest)
    return of_x, of_weight, None, None, None, None, None


_logprob_op.register_autograd(_head_gradients, setup_context=_keep_head)


def lm_head_logprob(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    head: LmHeadContract,
    lse: LogsumexpContract,
    contract: LogprobContract,
    logits_bytes: int = _head.LOGITS_BYTES,
) -> Tensor:
    """The log-probabilities of :func:`fastpath.products.lm_head.lm_head_logprob`, differentiable: float32 [tokens]."""
    chosen: Tensor = _logprob_op(x, weight, targets, _text(head), _text(lse), _text(contract), logits_bytes)[0]
    return chosen
