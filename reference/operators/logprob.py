"""Log-probability of the chosen token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array, index_array
from reference.operators._numerics import EXPS, LOGS, exp, log, narrow, quiet
from reference.operators.logsumexp import LogsumexpResult


@dataclass(frozen=True)
class Order(Group):
    formula: str = choice(
        ("x - lse", "(x - max) - log(sum)", "log(softmax(x))"),
        {
            "x - lse": "subtracts the log-sum-exp from the logit",
            "(x - max) - log(sum)": "subtracts the maximum first and the log of the sum second",
            "log(softmax(x))": "takes the log of the softmax",
        },
    )


@dataclass(frozen=True)
class Rounding(Group):
    output: str = format_choice(
        "float32", "returns the float32 log-probability", "rounds the log-probability to {value}"
    )


@dataclass(frozen=True)
class Primitives(Group):
    exp: str = choice(EXPS, "computes exp as {value}")
    log: str = choice(LOGS, "computes log as {value}")


@dataclass(frozen=True)
class LogprobContract(Contract):
    """y[t] = x[t, target[t]] - logsumexp(x[t])"""

    operator: ClassVar[str] = "logprob"
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        formula = self.order.formula
        if formula != "log(softmax(x))" and self.primitives.exp != EXPS[0]:
            raise ValueError(
                f"logprob: primitives.exp must stay {EXPS[0]!r} where order.formula is {formula}: no exp there"
            )
        if formula == "x - lse" and self.primitives.log != LOGS[0]:
            raise ValueError(
                f"logprob: primitives.log must stay {LOGS[0]!r} where order.formula is {formula}: no log there"
            )


def logprob(
    logits: Float32Array, targets: NDArray[Any], lse: LogsumexpResult, contract: LogprobContract
) -> Float32Array:
    """Log-probability of ``targets`` under the softmax of ``logits``.

    Args:
        logits: float32, [tokens, vocabulary].
        targets: integers, [tokens].
        lse: what :func:`reference.operators.logsumexp.logsumexp` returned for the same logits.

    Returns:
        float32, [tokens].

    Raises:
        TypeError, ValueError: dtype, shape or byte order; a target outside the vocabulary.
    """
    logits = float_array(logits, "logits", "tokens, vocabulary")
    tokens, vocabulary = logits.shape
    chosen = index_array(targets, "targets", "tokens", vocabulary, "the vocabulary")
    if chosen.shape[0] != tokens:
        raise ValueError(f"targets: expected {tokens}, one per row of logits, got {chosen.shape[0]}")
    for name, part in lse._asdict().items():
        float_array(part, f"lse.{name}", f"tokens={tokens}")
    x = logits[np.arange(tokens), chosen]
    return narrow(_formula(x, lse, contract), contract.rounding.output)


@quiet()
def _formula(x: Float32Array, lse: LogsumexpResult, contract: LogprobContract) -> Float32Array:
    primitives = contract.primitives
    match contract.order.formula:
        case "x - lse":
            return x - lse.value
        case "(x - max) - log(sum)":
            return (x - lse.maximum) - log(lse.total, primitives.log)
        case _:
            return log(exp(x - lse.maximum, primitives.exp) / lse.total, primitives.log)
