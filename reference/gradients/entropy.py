"""Gradient of the entropy in the (processed) logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice
from reference.operators._arguments import float_array, same_shape
from reference.operators._numerics import EXPS, exp, quiet


@dataclass(frozen=True)
class Primitives(Group):
    exp: str = choice(EXPS, "computes exp as {value}")


@dataclass(frozen=True)
class EntropyBackwardContract(Contract):
    """l = x - lse;  dx = (-exp(l) * (l + entropy)) * dy, and 0 where the logit is -inf; float32"""

    operator: ClassVar[str] = "entropy_backward"
    primitives: Primitives = Primitives()


@quiet()
def entropy_backward(
    grad: Float32Array,
    logits: Float32Array,
    value: Float32Array,
    entropy: Float32Array,
    contract: EntropyBackwardContract,
) -> Float32Array:
    """Gradient of the logits.

    Args:
        grad, value, entropy: float32, [tokens]: gradient of the entropy, the log-sum-exp, and the entropy in nats.
        logits: float32, [tokens, vocabulary].

    Returns:
        float32, [tokens, vocabulary].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument.
    """
    logits = float_array(logits, "logits", "tokens, vocabulary")
    grad = float_array(grad, "grad", f"tokens={logits.shape[0]}")
    for name, part in (("value", value), ("entropy", entropy)):
        same_shape(float_array(part, name, "tokens"), name, grad, "grad")
    log_p = logits - value[:, None]
    slopes = -exp(log_p, contract.primitives.exp) * (log_p + entropy[:, None])
    return np.where(np.isneginf(logits), np.float32(0), slopes * grad[:, None])
