"""Projection onto the vocabulary: a column-parallel linear layer with an output format of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reference.checks import Float32Array
from reference.contract.base import format_choice
from reference.operators.linear import LinearContract, linear
from reference.operators.linear import Rounding as LinearRounding


@dataclass(frozen=True)
class Rounding(LinearRounding):
    output: str = format_choice("float32", "hands logits on in float32, unrounded", "rounds logits to {value}")


@dataclass(frozen=True)
class LmHeadContract(LinearContract):
    """logits[t, v] = sum over k of x[t, k] * weight[v, k]"""

    operator: ClassVar[str] = "lm_head"
    rounding: Rounding = Rounding()

    def check(self) -> None:
        super().check()
        if self.order.bias != "before_rounding":
            raise ValueError("lm_head: order.bias must stay 'before_rounding': this layer has no bias")


def lm_head(x: Float32Array, weight: Float32Array, contract: LmHeadContract) -> Float32Array:
    """Logits of the real vocabulary; a padded head's extra rows are cut off before the call.

    Args:
        x: float32, [tokens, hidden].
        weight: float32, [vocabulary, hidden].

    Returns:
        float32, [tokens, vocabulary].

    Raises:
        TypeError, ValueError: as :func:`reference.operators.linear.linear`.
    """
    return linear(x, weight, contract)
