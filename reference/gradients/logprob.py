"""Gradient of log-probabilities in the (processed) logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice
from reference.operators._arguments import float_array, index_array
from reference.operators._numerics import EXPS, exp, quiet


@dataclass(frozen=True)
class Primitives(Group):
    exp: str = choice(EXPS, "computes exp as {value}")


@dataclass(frozen=True)
class LogprobBackwardContract(Contract):
    """dx[t, v] = dy[t] * ([v = target[t]] - exp(x[t, v] - lse[t])), float32"""

    operator: ClassVar[str] = "logprob_backward"
    primitives: Primitives = Primitives()


@quiet()
def logprob_backward(
    grad: Float32Array,
    logits: Float32Array,
    targets: NDArray[Any],
    value: Float32Array,
    contract: LogprobBackwardContract,
) -> Float32Array:
    """Gradient of the logits.

    Args:
        grad: float32, [tokens]: of the log-probabilities.
        logits: float32, [tokens, vocabulary].
        targets: integers, [tokens].
        value: float32, [tokens]: the log-sum-exp.

    Returns:
        float32, [tokens, vocabulary].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; a target outside the vocabulary.
    """
    logits = float_array(logits, "logits", "tokens, vocabulary")
    grad = float_array(grad, "grad", f"tokens={logits.shape[0]}")
    value = float_array(value, "value", f"tokens={logits.shape[0]}")
    chosen = index_array(targets, "targets", "tokens", logits.shape[1], "the vocabulary")
    slopes = np.float32(0) - exp(logits - value[:, None], contract.primitives.exp)
    rows = np.arange(logits.shape[0])
    slopes[rows, chosen] = np.float32(1) - exp(logits[rows, chosen] - value, contract.primitives.exp)
    return grad[:, None] * slopes
