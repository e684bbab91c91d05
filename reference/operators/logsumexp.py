"""Log-sum-exp over the vocabulary: a maximum (exact in any order), then a sum whose order is fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array
from reference.operators._numerics import EXPS, LOGS, ROW_ORDERS, exp, log, narrow, quiet, row_order_words, row_sum
from reference.operators.all_reduce import reduce_ranks


@dataclass(frozen=True)
class Partition(Group):
    segments: int = choice(
        (8, 1, 2, 4, 16, 64),
        {1: "sums the whole vocabulary at once"}
        | {n: f"sums each of {n} equal parts of the vocabulary, then the parts" for n in (8, 2, 4, 16, 64)},
    )


@dataclass(frozen=True)
class Order(Group):
    sum: str = choice(ROW_ORDERS, row_order_words("adds the exponentials"))
    merge: str = choice(
        ("tree", "chain"),
        {"tree": "merges the parts up a balanced tree", "chain": "merges the parts one after the other"},
        equivalent="with up to 2 segments a tree is a chain",
    )


@dataclass(frozen=True)
class Rounding(Group):
    logits: str = format_choice(
        "float32",
        "takes logits as they are",
        "rounds logits to {value} first",
        equivalent="logits that already are values of the format do not change",
    )
    shifted: str = format_choice("float32", "keeps logit - max in float32", "rounds logit - max to {value}")
    output: str = format_choice("float32", "returns the float32 result", "rounds the result to {value}")


@dataclass(frozen=True)
class Primitives(Group):
    exp: str = choice(EXPS, "computes exp as {value}")
    log: str = choice(LOGS, "computes log as {value}")


@dataclass(frozen=True)
class LogsumexpContract(Contract):
    """m = max over v of x[t, v];  total = sum over v of exp(x[t, v] - m);  y[t] = m + log(total)
    The vocabulary is cut into segments of ceil(V / segments) columns; missing columns take no part."""

    operator: ClassVar[str] = "logsumexp"
    partition: Partition = Partition()
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        if self.partition.segments == 1 and self.order.merge != "tree":
            raise ValueError("logsumexp: order.merge must stay 'tree' with 1 segment: nothing is merged")


class LogsumexpResult(NamedTuple):
    """``value`` = ``maximum`` + log(``total``), float32, [tokens] each; the parts serve logprob and entropy."""

    value: Float32Array
    maximum: Float32Array
    total: Float32Array


def logsumexp(logits: Float32Array, contract: LogsumexpContract) -> LogsumexpResult:
    """Log of the sum of exponentials of each row. A column of -inf (masked) adds exactly 0.

    Args:
        logits: float32, [tokens, vocabulary].

    Raises:
        TypeError, ValueError: dtype, shape or byte order; an empty vocabulary; a row with everything masked (-inf).
    """
    logits = narrow(float_array(logits, "logits", "tokens, vocabulary"), contract.rounding.logits)
    maximum = row_maximum(logits)
    terms = exp(shifted_logits(logits, maximum, contract), contract.primitives.exp)
    total = segment_sum(terms, contract)
    with quiet():
        value = narrow(maximum + log(total, contract.primitives.log), contract.rounding.output)
    return LogsumexpResult(value, maximum, total)


def row_maximum(logits: Float32Array) -> Float32Array:
    """Largest logit of each row, NaN if there is one. Raises ValueError for a row without any logit above -inf."""
    if logits.shape[1] == 0:
        raise ValueError("logits: the vocabulary is empty")
    maximum: Float32Array = logits.max(axis=1)
    masked = np.flatnonzero(np.isneginf(maximum))
    if masked.size:
        raise ValueError(f"logits[{int(masked[0])}]: every entry is -inf, so the row has no distribution")
    return maximum


@quiet()
def shifted_logits(logits: Float32Array, maximum: Float32Array, contract: LogsumexpContract) -> Float32Array:
    """logits - max, narrowed."""
    return narrow(logits - maximum[:, None], contract.rounding.shifted)


@quiet()
def segment_sum(terms: Float32Array, contract: LogsumexpContract) -> Float32Array:
    """Sum of each row of ``terms`` in the contract's partition and order."""
    width = -(-terms.shape[1] // contract.partition.segments)
    parts = [terms[:, i * width : (i + 1) * width] for i in range(contract.partition.segments)]
    sums = [row_sum(part, contract.order.sum) for part in parts]
    return reduce_ranks(sums, contract.order.merge, "float32", "float32")
