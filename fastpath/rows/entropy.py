# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Entropy of the next-token distribution, and its gradient: `reference.operators.entropy`.

The sum over the vocabulary is the log-sum-exp's, with another term: same partition, lanes and trees.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath.backend import launch, require_fields, require_tensor
from fastpath.primitives import div_rn, exp, log, pairs_tree
from fastpath.rows import logsumexp as sums_of
from fastpath.rows.logsumexp import LogsumexpResult
from reference.gradients import EntropyBackwardContract
from reference.operators.entropy import EntropyContract
from reference.operators.logsumexp import LogsumexpContract

#: Formulas of the contract that have a kernel: the term that `sum_kernel` adds.
FORMULAS = {"log(sum) - mean(x - max)": 1, "lse - mean(x)": 2}


@triton.jit
def entropy_kernel(sums, value, total, out, rows, SEGMENTS: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = log(total) (or the log-sum-exp) - the tree over sums [rows, SEGMENTS], divided by total."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    at = row.to(tl.int64)[:, None] * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
    added = pairs_tree(tl.load(sums + at, mask=inside[:, None], other=0.0), BLOCK, SEGMENTS)
    divisor = tl.load(total + row, mask=inside, other=1.0)
    largest = log(divisor) if SHIFTED else tl.load(value + row, mask=inside, other=0.0)
    tl.store(out + row, largest - div_rn(added, divisor), mask=inside)


@triton.jit
def gradient_kernel(logits, value, nats, upstream, out, columns, BLOCK: tl.constexpr):
    """out[row, v] = (-p * (log p + entropy)) * upstream[row], and 0 where the logit is -inf."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * columns + column, mask=inside, other=0.0)
    log_p = x - tl.load(value + row)
    slope = -exp(log_p) * (log_p + tl.load(nats + row))
    gradient = tl.where(x == float("-inf"), 0.0, slope * tl.load(upstream + row))
    tl.store(out + row * columns + column, gradient, mask=inside)


def entropy(
    logits: torch.Tensor, lse: LogsumexpResult, contract: EntropyContract, sums: LogsumexpContract
) -> torch.Tensor:
    """Entropy of the softmax of each row, in nats.

    Args:
        logits: float32, [tokens, vocabulary].
        lse: what :func:`fastpath.rows.logsumexp.logsumexp` returned for the same logits under ``sums``.
        sums: the contract of the sum over the vocabulary.

    Returns:
        float32, [tokens].

    Raises:
        TypeError, ValueError: dtype, shape, layout or device.
        UnsupportedError: a contract without a kernel.
    """
    require_contract(contract)
    sums_of.require_contract(sums)
    require_tensor(logits, "logits", "tokens, vocabulary", torch.float32)
    rows = logits.shape[0]
    sums_of.require_result(lse, rows)
    term = FORMULAS[contract.order.formula]
    parts = sums_of.segment_sums(logits, lse.maximum, sums, term=term, of=contract)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = 32
        constants = {"SEGMENTS": parts.shape[1], "SHIFTED": term == 1, "BLOCK": block}
        arguments = (parts, lse.value, lse.total, out, rows)
        launch(entropy_kernel, (triton.cdiv(rows, block),), *arguments, contract=contract, **constants)
    return out


def entropy_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    value: torch.Tensor,
    nats: torch.Tensor,
    contract: EntropyBackwardContract,
) -> torch.Tensor:
    """Gradient of the entropy in the logits: `reference.gradients.entropy`.

    Args:
        grad, value, nats: float32, [tokens]: gradient of the entropy, the log-sum-exp, and the entropy.
        logits: float32, [tokens, vocabulary].

    Returns:
        float32, [tokens, vocabulary].

    Raises:
        TypeError, ValueError, UnsupportedError: as :func:`entropy`.
    """
    require_fields(contract, {"primitives.exp": "rlk"})
    require_tensor(logits, "logits", "tokens, vocabulary", torch.float32)
    rows, columns = logits.shape
    for name, part in (("grad", grad), ("value", value), ("nats", nats)):
        require_tensor(part, name, f"tokens={rows}", torch.float32)
    out = torch.empty_like(logits)
    if out.numel():
        block = 1024
        grid = (rows, triton.cdiv(columns, block))
        launch(gradient_kernel, grid, logits, value, nats, grad, out, columns, contract=contract, BLOCK=block)
    return out


def require_contract(contract: EntropyContract) -> None:
    """Refuse what the kernels do not compute: UnsupportedError naming the field."""
    implemented = {"order.formula": tuple(FORMULAS), "rounding.output": "float32"}
    require_fields(contract, {**implemented, "primitives.exp": "rlk", "primitives.log": "rlk"})
