"""Gradient of temperature and masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice
from reference.operators._arguments import float_array, positive, same_shape
from reference.operators._numerics import quiet


@dataclass(frozen=True)
class Primitives(Group):
    temperature: str = choice(
        ("divide", "reciprocal"),
        {
            "divide": "divides gradients by the temperature",
            "reciprocal": "multiplies gradients by fp32(1 / temperature)",
        },
    )


@dataclass(frozen=True)
class ProcessedLogitsBackwardContract(Contract):
    """dx = dy / temperature, and 0 where the processed logit is -inf; float32"""

    operator: ClassVar[str] = "processed_logits_backward"
    primitives: Primitives = Primitives()


@quiet()
def processed_logits_backward(
    grad: Float32Array, processed: Float32Array, temperature: float, contract: ProcessedLogitsBackwardContract
) -> Float32Array:
    """Gradient of the logits.

    Args:
        grad, processed: float32, [tokens, vocabulary]: gradient of the processed logits, and these.
        temperature: above 0, rounded to float32.

    Returns:
        float32, [tokens, vocabulary].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; the temperature.
    """
    grad = float_array(grad, "grad", "tokens, vocabulary")
    same_shape(float_array(processed, "processed", "tokens, vocabulary"), "processed", grad, "grad")
    positive(temperature, "temperature")
    divisor = np.float32(temperature)
    scaled = grad / divisor if contract.primitives.temperature == "divide" else grad * (np.float32(1) / divisor)
    return np.where(np.isneginf(processed), np.float32(0), scaled)
