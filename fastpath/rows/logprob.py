# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Log-probability of the chosen token, and its gradient: `reference.operators.logprob`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastpath.backend import DTYPES, launch, require_fields, require_tensor
from fastpath.primitives import exp, log, narrow
from fastpath.rows.logsumexp import LogsumexpResult, require_result
from reference.gradients import LogprobBackwardContract
from reference.operators.logprob import LogprobContract

#: Formulas of the contract that have a kernel, as its compile-time constant.
FORMULAS = {"x - lse": 0, "(x - max) - log(sum)": 1}


@triton.jit
def logprob_kernel(
    logits, targets, value, maximum, total, out, rows, columns, FORMULA: tl.constexpr, BLOCK: tl.constexpr
):
    """out[row] = log-probability of targets[row]; NaN for a target outside the vocabulary."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    target = tl.load(targets + row, mask=inside, other=-1).to(tl.int64)
    valid = (target >= 0) & (target < columns)
    x = tl.load(logits + row.to(tl.int64) * columns + target, mask=valid, other=float("nan"))
    if FORMULA == 0:
        result = x - tl.load(value + row, mask=inside, other=0.0)
    else:
        shifted = x - tl.load(maximum + row, mask=inside, other=0.0)
        result = shifted - log(tl.load(total + row, mask=inside, other=1.0))
    tl.store(out + row, result, mask=inside)


@triton.jit
def gradient_kernel(logits, targets, value, upstream, out, columns, BLOCK: tl.constexpr):
    """out[row, v] = upstream[row] * ([v is the target] - exp(logit - lse)), rounded to the output's dtype."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * columns + column, mask=inside, other=0.0)
    probability = exp(x - tl.load(value + row))
    chosen = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    gradient = tl.load(upstream + row) * (chosen - probability)
    tl.store(out + row * columns + column, narrow(gradient, out.dtype.element_ty), mask=inside)


def logprob(
    logits: torch.Tensor, targets: torch.Tensor, lse: LogsumexpResult, contract: LogprobContract
) -> torch.Tensor:
    """Log-probability of ``targets`` under the softmax of ``logits``.

    Args:
        logits: float32, [tokens, vocabulary].
        targets: int32 or int64, [tokens]. One outside the vocabulary gives NaN.
        lse: what :func:`fastpath.rows.logsumexp.logsumexp` returned for the same logits.

    Returns:
        float32, [tokens].

    Raises:
        TypeError, ValueError: dtype, shape, layout or device.
        UnsupportedError: a contract without a kernel.
    """
    require_contract(contract)
    require_tensor(logits, "logits", "tokens, vocabulary", torch.float32)
    rows, columns = logits.shape
    require_tensor(targets, "targets", f"tokens={rows}", torch.int64, torch.int32)
    require_result(lse, rows)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = 128
        launch(
            logprob_kernel,
            (triton.cdiv(rows, block),),
            *(logits, targets, *lse, out, rows, columns),
            contract=contract,
            FORMULA=FORMULAS[contract.order.formula],
            BLOCK=block,
        )
    return out


@triton.jit
def all_logprobs_kernel(logits, value, maximum, total, out, columns, FORMULA: tl.constexpr, BLOCK: tl.constexpr):
    """out[row, v] = log-probability of v."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * columns + column, mask=column < columns, other=0.0)
    if FORMULA == 0:
        result = x - tl.load(value + row)
    else:
        # a block of one value: a scalar's logarithm would be another code path of the compiler
        sums = tl.load(total + row + tl.zeros((BLOCK,), tl.int32))
        result = (x - tl.load(maximum + row)) - log(sums)
    tl.store(out + row * columns + column, result, mask=column < columns)


def all_logprobs(logits: torch.Tensor, lse: LogsumexpResult, contract: LogprobContract) -> torch.Tensor:
    """Log-probability of every token: :func:`logprob` of each column.

    Args:
        logits: float32, [tokens, vocabulary].
        lse: what :func:`fastpath.rows.logsumexp.logsumexp` returned for the same logits.

    Returns:
        float32, [tokens, vocabulary].

    Raises:
        TypeError, ValueError, UnsupportedError: as :func:`logprob`.
    """
    require_contract(contract)
    require_tensor(logits, "logits", "tokens, vocabulary", torch.float32)
    rows, columns = logits.shape
    require_result(lse, rows)
    out = torch.empty_like(logits)
    if out.numel():
        block = 1024
        launch(
            all_logprobs_kernel,
            (rows, triton.cdiv(columns, block)),
            *(logits, *lse, out, columns),
            contract=contract,
            FORMULA=FORMULAS[contract.order.formula],
            BLOCK=block,
        )
    return out


def logprob_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    value: torch.Tensor,
    upstream: torch.Tensor,
    contract: LogprobBackwardContract,
    output: torch.dtype,
) -> torch.Tensor:
    """Gradient of the log-probabilities in the logits: `reference.gradients.logprob`, rounded once to ``output``.

    Args:
        logits: float32, [tokens, vocabulary].
        targets: int64 or int32, [tokens].
        value: float32, [tokens]: the log-sum-exp.
        upstream: float32, [tokens]: the loss's gradient in the log-probabilities.

    Returns:
        ``output`` (bfloat16 or float32), [tokens, vocabulary].

    Raises:
        TypeError, ValueError, UnsupportedError: as :func:`logprob`.
    """
    require_fields(contract, {"primitives.exp": "rlk"})
    require_tensor(logits, "logits", "tokens, vocabulary", torch.float32)
    rows, columns = logits.shape
    require_tensor(targets, "targets", f"tokens={rows}", torch.int64, torch.int32)
    require_tensor(value, "value", f"tokens={rows}", torch.float32)
    require_tensor(upstream, "upstream", f"tokens={rows}", torch.float32)
    if output not in DTYPES.values():
        raise TypeError(f"output: expected bfloat16 or float32, got {output}")
    out = torch.empty(rows, columns, dtype=output, device=logits.device)
    if out.numel():
        block = 1024
        arguments: tuple[Any, ...] = (logits, targets, value, upstream, out, columns)
        launch(gradient_kernel, (rows, triton.cdiv(columns, block)), *arguments, contract=contract, BLOCK=block)
    return out


def require_contract(contract: LogprobContract) -> None:
    """Refuse what the kernels do not compute: UnsupportedError naming the field."""
    implemented = {"order.formula": tuple(FORMULAS), "rounding.output": "float32", "primitives.log": "rlk"}
    require_fields(contract, {**implemented, "primitives.exp": "rlk"})
