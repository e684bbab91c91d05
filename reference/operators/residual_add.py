"""The residual add as an operator of its own (engines that do not fuse it into the next norm)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, format_choice
from reference.operators._arguments import float_array, same_shape
from reference.operators._numerics import narrow, quiet


@dataclass(frozen=True)
class Rounding(Group):
    output: str = format_choice("bfloat16", "rounds the sum to {value}", given=True)


@dataclass(frozen=True)
class ResidualAddContract(Contract):
    """y = x + residual"""

    operator: ClassVar[str] = "residual_add"
    rounding: Rounding = Rounding()


def residual_add(x: Float32Array, residual: Float32Array, contract: ResidualAddContract) -> Float32Array:
    """The float32 sum of ``x`` and ``residual`` ([tokens, hidden] each), rounded once.

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument.
    """
    x = float_array(x, "x", "tokens, hidden")
    residual = float_array(residual, "residual", "tokens, hidden")
    same_shape(residual, "residual", x, "x")
    with quiet():
        return narrow(x + residual, contract.rounding.output)
