"""Projection onto the vocabulary, with logits: `reference.operators.lm_head`; and fused with the log-probability.

The fused form holds the logits of a few hundred tokens at a time: memory does not grow with the number of tokens, and
the bits are those of lm_head, logsumexp and logprob one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from fastpath.backend import current_target, require_tensor, require_unit
from fastpath.products import matmul_hopper, schedules
from fastpath.products.linear import input_gradient, linear, narrow_to, weight_gradient
from fastpath.products.matmul import product, require_contract, require_operands
from fastpath.rows.logprob import logprob, logprob_gradient
from fastpath.rows.logprob import require_contract as require_logprob
from fastpath.rows.logsumexp import LogsumexpResult, finish, merge_maxima, row_maximum, segment_sums
from fastpath.rows.logsumexp import require_contract as require_logsumexp
from reference.gradients import gradient_contract
from reference.operators.lm_head import LmHeadContract
from reference.operators.logprob import LogprobContract
from reference.operators.logsumexp import LogsumexpContract

#: Bytes of logits that exist at a time.
LOGITS_BYTES = 256 * 2**20


def lm_head(
    x: torch.Tensor, weight: torch.Tensor, contract: LmHeadContract, plan: schedules.Schedule | None = None
) -> torch.Tensor:
    """Logits of the real vocabulary; a padded head's extra rows are cut off before the call.

    Args:
        x: [tokens, hidden], of the contract's ``domain.input``.
        weight: [vocabulary, hidden], likewise.

    Returns:
        [tokens, vocabulary], of the contract's ``rounding.output`` (float32 in strict-v1).

    Raises:
        TypeError, ValueError, UnsupportedError: as :func:`fastpath.products.linear.linear`.
    """
    return linear(x, weight, contract, None, plan)


def lm_head_logprob(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    head: LmHeadContract,
    lse: LogsumexpContract,
    contract: LogprobContract,
    logits_bytes: int = LOGITS_BYTES,
) -> tuple[torch.Tensor, LogsumexpResult]:
    """Log-probabilities of ``targets`` and the log-sum-exp, without the logits of all tokens.

    Args:
        x: [tokens, hidden], of the head contract's ``domain.input``.
        weight: [vocabulary, hidden], likewise.
        targets: int64 or int32, [tokens]. One outside the vocabulary gives NaN.
        logits_bytes: memory for logits; at least one block of 16 tokens is held.

    Returns:
        float32 [tokens], and the log-sum-exp with its parts.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device of an argument.
        UnsupportedError: a contract without a kernel, or a head that does not hand on float32 logits.
    """
    require_contract(head, None)
    require_logsumexp(lse)
    require_logprob(contract)
    output = require_operands(x, weight, head, None)
    if output != torch.float32:
        raise TypeError(f"head: rounding.output must be float32 for the fused form, got {output}")
    tokens = x.shape[0]
    require_tensor(targets, "targets", f"tokens={tokens}", torch.int64, torch.int32)
    results = []
    for rows in token_blocks(tokens, weight.shape[0], logits_bytes):
        logits, maximum = logits_and_maximum(x[rows], weight, head, lse)
        part = finish(segment_sums(logits, maximum, lse), maximum, lse)
        results.append((logprob(logits, targets[rows], part, contract), *part))
    chosen, value, maximum, total = (torch.cat(column) for column in zip(*results, strict=True))
    return chosen, LogsumexpResult(value, maximum, total)


def token_blocks(tokens: int, vocabulary: int, logits_bytes: int) -> Iterator[slice]:
    """Slices of tokens whose float32 logits fit: whole tiles of 128 where possible, else multiples of 16."""
    fitting = logits_bytes // (4 * vocabulary)
    block = fitting // 128 * 128 or max(16, fitting // 16 * 16)
    for start in range(0, max(tokens, 1), block):
        yield slice(start, min(start + block, tokens))


def logits_and_maximum(
    x: torch.Tensor, weight: torch.Tensor, head: LmHeadContract, lse: LogsumexpContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 logits [tokens, vocabulary] and their row maxima [tokens], from the product itself where it can."""
    tokens, vocabulary = x.shape[0], weight.shape[0]
    segments, target, unit = head.partition.segments, current_target(), require_unit(head)
    segment = x.shape[1] // segments
    plan = schedules.schedule(target, unit, tokens, vocabulary, segment, segments)
    plan = schedules.fit(plan, x, weight, segments, target, unit)
    if not (plan.persistent and segments == 1 and tokens):
        logits = product(x, weight, head, segments, torch.float32, None, plan)
        return logits, row_maximum(logits, lse)
    logits = torch.empty(tokens, vocabulary, dtype=torch.float32, device=x.device)
    maxima = torch.empty(tokens, triton.cdiv(vocabulary, plan.outputs), dtype=torch.int32, device=x.device)
    matmul_hopper.launch_persistent(x, weight, None, logits, x.shape[1], 1, plan, head, maxima)
    return logits, merge_maxima(maxima, lse)


def lm_head_logprob_gradient(
    upstream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    value: torch.Tensor,
    head: LmHeadContract,
    lse: LogsumexpContract,
    contract: LogprobContract,
    logits_bytes: int = LOGITS_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the log-probabilities in x and weight: the logits of each block of tokens are computed again.

    They are those of `reference.gradients` logprob_backward and lm_head_backward; the chain of the weight's goes on
    from block to block, so that no block size can change a bit.

    Args:
        upstream: float32, [tokens]: the loss's gradient in the log-probabilities.
        value: float32, [tokens]: the log-sum-exp that :func:`lm_head_logprob` returned.

    Returns:
        Gradients like x and weight.

    Raises:
        TypeError, ValueError, UnsupportedError: as :func:`lm_head_logprob`.
    """
    own: Any = gradient_contract(head)
    of_logits: Any = gradient_contract(contract)
    grad_x = torch.empty_like(x)
    sums = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    for rows in token_blocks(x.shape[0], weight.shape[0], logits_bytes) if x.shape[0] else ():
        logits, _ = logits_and_maximum(x[rows], weight, head, lse)
        slopes = logprob_gradient(logits, targets[rows], value[rows], upstream[rows], of_logits, x.dtype)
        grad_x[rows] = input_gradient(slopes, weight, own)
        weight_gradient(slopes[None], x[None, rows], own, sums)
    return grad_x, narrow_to(sums, weight.dtype, own)
