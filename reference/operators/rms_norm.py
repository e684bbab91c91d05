"""Root-mean-square normalisation, alone or after a residual add (Zhang and Sennrich 2019, "RMSNorm")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array, positive, same_shape
from reference.operators._numerics import (
    ROW_ORDERS,
    RSQRTS,
    narrow,
    quiet,
    row_order_words,
    row_sum_squares,
    rsqrt,
)


@dataclass(frozen=True)
class Order(Group):
    sum: str = choice(ROW_ORDERS, row_order_words("adds the squares"))
    product: str = choice(
        ("(x*r)*w", "x*(r*w)"),
        {
            "(x*r)*w": "scales by 1/rms first and by the weight second",
            "x*(r*w)": "multiplies 1/rms into the weight first",
        },
    )


@dataclass(frozen=True)
class Precision(Group):
    variance: str = format_choice(
        "float32", "holds the squares and their mean in float32", "rounds each square and the mean to {value}"
    )


@dataclass(frozen=True)
class NormRounding(Group):
    normalised: str = format_choice(
        "float32",
        "keeps x/rms in float32 up to the weight multiply",
        "rounds x/rms to {value} before the weight multiply",
    )
    output: str = format_choice("bfloat16", "rounds the output to {value}", given=True)


@dataclass(frozen=True)
class Rounding(NormRounding):
    sum: str = format_choice(
        "bfloat16",
        "normalises the unrounded float32 residual sum",
        "rounds the residual sum to {value} before it normalises it",
    )
    residual: str = format_choice("bfloat16", "hands the residual sum on in {value}")


@dataclass(frozen=True)
class Primitives(Group):
    square: str = choice(
        ("fma", "mul_add"),
        {"fma": "accumulates squares by FMA", "mul_add": "rounds each square before it is added"},
    )
    mean: str = choice(
        ("divide", "reciprocal", "reciprocal_fma"),
        {
            "divide": "divides the sum by n, then adds epsilon",
            "reciprocal": "multiplies the sum by fp32(1/n), then adds epsilon",
            "reciprocal_fma": "computes fma(sum, fp32(1/n), epsilon)",
        },
    )
    rsqrt: str = choice(
        RSQRTS,
        {
            "rlk": "takes 1/sqrt and one compensated Newton step",
            "correctly-rounded": "takes the correctly rounded reciprocal square root",
            "uncompensated": "takes an IEEE square root and an IEEE division",
        },
    )


@dataclass(frozen=True)
class RmsNormContract(Contract):
    """s = x + residual (if there is one);  y = s * rsqrt(mean(s^2) + epsilon) * weight"""

    operator: ClassVar[str] = "rms_norm"
    order: Order = Order()
    precision: Precision = Precision()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        check_product(self)


class NormContract(Protocol):
    """What the contracts of the norms have in common: `RmsNormContract`, and `QkNormContract` of the heads."""

    operator: ClassVar[str]

    @property
    def order(self) -> Order: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def rounding(self) -> NormRounding: ...

    @property
    def primitives(self) -> Primitives: ...


def check_product(contract: NormContract) -> None:
    """Raise ValueError if the contract rounds a value that its product order never forms."""
    if contract.order.product == "x*(r*w)" and contract.rounding.normalised != "float32":
        raise ValueError(
            f"{contract.operator}: rounding.normalised must be float32 where order.product is x*(r*w), "
            "since x/rms is never formed"
        )


class RmsNormResult(NamedTuple):
    """``output`` and, of the form with a residual, ``residual``: the sum that the next block adds to (else None)."""

    output: Float32Array
    residual: Float32Array | None


def rms_norm(
    x: Float32Array,
    weight: Float32Array,
    epsilon: float,
    contract: RmsNormContract,
    residual: Float32Array | None = None,
) -> RmsNormResult:
    """Normalise each row of ``x``, or of ``x + residual``.

    Args:
        x: float32, [tokens, hidden].
        weight: float32, [hidden].
        epsilon: added to the mean square; rounded to float32.
        residual: float32, [tokens, hidden].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; epsilon not above zero.
    """
    x = float_array(x, "x", "tokens, hidden")
    weight = float_array(weight, "weight", f"hidden={x.shape[1]}")
    positive(epsilon, "epsilon")
    if residual is None:
        return RmsNormResult(normalise(x, weight, epsilon, contract), None)
    residual = float_array(residual, "residual", "tokens, hidden")
    same_shape(residual, "residual", x, "x")
    with quiet():
        total = x + residual
    output = normalise(narrow(total, contract.rounding.sum), weight, epsilon, contract)
    return RmsNormResult(output, narrow(total, contract.rounding.residual))


@quiet()
def normalise(x: Float32Array, weight: Float32Array, epsilon: float, contract: NormContract) -> Float32Array:
    """The norm of the last axis of ``x``; ``weight`` broadcasts. Arguments are not checked."""
    scale = rsqrt(_mean_square(x, epsilon, contract), contract.primitives.rsqrt)[..., None]
    if contract.order.product == "x*(r*w)":
        return narrow(x * (scale * weight), contract.rounding.output)
    normalised = narrow(x * scale, contract.rounding.normalised)
    return narrow(normalised * weight, contract.rounding.output)


def _mean_square(x: Float32Array, epsilon: float, contract: NormContract) -> Float32Array:
    """mean(x^2) + epsilon over the last axis."""
    variance, mean = contract.precision.variance, contract.primitives.mean
    total = row_sum_squares(x, contract.order.sum, contract.primitives.square, variance)
    n, eps = np.float32(x.shape[-1]), np.float32(epsilon)
    if mean == "reciprocal_fma":
        return fused_multiply_add(total, np.float32(1) / n, eps)
    average = total / n if mean == "divide" else total * (np.float32(1) / n)
    return narrow(average, variance) + eps
