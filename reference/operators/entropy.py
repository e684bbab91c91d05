"""Entropy of the next-token distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array
from reference.operators._numerics import EXPS, LOGS, exp, log, narrow, quiet
from reference.operators.logsumexp import LogsumexpContract, LogsumexpResult, segment_sum, shifted_logits


@dataclass(frozen=True)
class Order(Group):
    formula: str = choice(
        ("log(sum) - mean(x - max)", "lse - mean(x)", "-sum(p log p)"),
        {
            "log(sum) - mean(x - max)": "subtracts the mean of the shifted logits from the log of the sum",
            "lse - mean(x)": "subtracts the mean logit from the log-sum-exp",
            "-sum(p log p)": "sums p times log p",
        },
    )


@dataclass(frozen=True)
class Rounding(Group):
    output: str = format_choice("float32", "returns the float32 entropy", "rounds the entropy to {value}")


@dataclass(frozen=True)
class Primitives(Group):
    exp: str = choice(EXPS, "computes exp as {value}")
    log: str = choice(LOGS, "computes log as {value}")


@dataclass(frozen=True)
class EntropyContract(Contract):
    """y[t] = log(total) - (sum over v of e[v] * (x[t, v] - m)) / total,  e[v] = exp(x[t, v] - m)
    The sum over v has the partition and order of the log-sum-exp. A masked column (-inf) adds exactly 0."""

    operator: ClassVar[str] = "entropy"
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        if self.order.formula == "lse - mean(x)" and self.primitives.log != LOGS[0]:
            raise ValueError(
                f"entropy: primitives.log must stay {LOGS[0]!r} where order.formula is lse - mean(x): no log there"
            )


@quiet()
def entropy(
    logits: Float32Array, lse: LogsumexpResult, contract: EntropyContract, sums: LogsumexpContract
) -> Float32Array:
    """Entropy of the softmax of each row, in nats.

    Args:
        logits: float32, [tokens, vocabulary].
        lse: what :func:`reference.operators.logsumexp.logsumexp` returned for the same logits under ``sums``.
        sums: the contract of the sum over the vocabulary.

    Returns:
        float32, [tokens].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument.
    """
    logits = float_array(logits, "logits", "tokens, vocabulary")
    for name, part in lse._asdict().items():
        float_array(part, f"lse.{name}", f"tokens={logits.shape[0]}")
    logits = narrow(logits, sums.rounding.logits)
    shifted = shifted_logits(logits, lse.maximum, sums)
    weights = exp(shifted, contract.primitives.exp)
    log_total = log(lse.total, contract.primitives.log)
    match contract.order.formula:
        case "log(sum) - mean(x - max)":
            result = log_total - segment_sum(_product(weights, shifted), sums) / lse.total
        case "lse - mean(x)":
            result = lse.value - segment_sum(_product(weights, logits), sums) / lse.total
        case _:
            p = weights / lse.total[:, None]
            result = -segment_sum(_product(p, shifted - log_total[:, None]), sums)
    return narrow(result, contract.rounding.output)


def _product(weights: Float32Array, values: Float32Array) -> Float32Array:
    """weights * values, and 0 where the column is masked (0 * -inf would be NaN)."""
    return np.where(np.isneginf(values), np.float32(0), weights * values)
