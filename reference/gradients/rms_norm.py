"""Gradients of root-mean-square normalisation (Zhang and Sennrich 2019), alone or after a residual add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.gradients._sums import (
    PRODUCT_ORDERS,
    ROW_BLOCKS,
    ROW_WORDS,
    checked_sums,
    row_gradient,
    sum_of_products,
)
from reference.operators._arguments import float_array, positive, same_shape
from reference.operators._numerics import RSQRTS, narrow, quiet, rsqrt


@dataclass(frozen=True)
class Partition(Group):
    rows: int = choice(ROW_BLOCKS, ROW_WORDS)


@dataclass(frozen=True)
class Order(Group):
    sum: str = choice(
        tuple(PRODUCT_ORDERS),
        {name: f"adds squares, and products with the gradient, {words}" for name, (words, _) in PRODUCT_ORDERS.items()},
    )


@dataclass(frozen=True)
class Rounding(Group):
    input: str = format_choice("bfloat16", "rounds the gradient of the input to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    mean: str = choice(
        ("divide", "reciprocal"),
        {"divide": "divides both sums by n", "reciprocal": "multiplies both sums by fp32(1/n)"},
    )
    rsqrt: str = choice(RSQRTS, "computes the reciprocal square root as {value}")


@dataclass(frozen=True)
class RmsNormBackwardContract(Contract):
    """r = rsqrt(mean(x^2) + epsilon);  g = dy * weight;  m = mean(g * x)
    dx = r * fma(-x, (m * r) * r, g)  (+ dresidual);  dweight = sum over tokens of dy * (x * r)"""

    operator: ClassVar[str] = "rms_norm_backward"
    partition: Partition = Partition()
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()


class RmsNormGradients(NamedTuple):
    """Of ``x`` (and of the residual: the same), rounded; and of ``weight``, float32 sums, not rounded."""

    x: Float32Array
    weight: Float32Array


def rms_norm_backward(
    grad: Float32Array,
    x: Float32Array,
    weight: Float32Array,
    epsilon: float,
    contract: RmsNormBackwardContract,
    sums: Float32Array | None = None,
    grad_residual: Float32Array | None = None,
) -> RmsNormGradients:
    """Gradients of the norm of every token.

    Args:
        grad, x: float32, [sequences, tokens, hidden]. ``x`` is what was normalised.
        weight: float32, [hidden].
        epsilon: as in the forward pass.
        sums: float32, [hidden], from which the weight's gradient goes on; None is +0.
        grad_residual: float32 like ``x``: gradient of the residual sum that the fused forward pass hands on.

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; epsilon not above zero.
    """
    x = float_array(x, "x", "sequences, tokens, hidden")
    grad = float_array(grad, "grad", "sequences, tokens, hidden")
    same_shape(grad, "grad", x, "x")
    weight = float_array(weight, "weight", f"hidden={x.shape[2]}")
    positive(epsilon, "epsilon")
    if grad_residual is not None:
        same_shape(float_array(grad_residual, "grad_residual", "sequences, tokens, hidden"), "grad_residual", x, "x")
    total = checked_sums(sums, f"hidden={x.shape[2]}")
    dx, normal = row_gradients(grad, x, weight, epsilon, contract, grad_residual)
    return RmsNormGradients(dx, row_gradient(grad, normal, contract.partition.rows, total))


@quiet()
def row_gradients(
    grad: Float32Array,
    x: Float32Array,
    weight: Float32Array,
    epsilon: float,
    contract: Any,  # of the norm, or of the norm of heads, which has the same fields
    grad_residual: Float32Array | None = None,
) -> tuple[Float32Array, Float32Array]:
    """Gradient of ``x`` over the last axis, rounded, and x * r. Arguments are not checked."""

    def mean(total: Float32Array) -> Float32Array:
        n = np.float32(x.shape[-1])
        return total / n if contract.primitives.mean == "divide" else total * (np.float32(1) / n)

    order = contract.order.sum
    scale = rsqrt(mean(sum_of_products(x, x, order)) + np.float32(epsilon), contract.primitives.rsqrt)
    slope = grad * weight
    pull = (mean(sum_of_products(slope, x, order)) * scale) * scale
    dx = scale[..., None] * fused_multiply_add(x, -np.broadcast_to(pull[..., None], x.shape), slope)
    if grad_residual is not None:
        dx = dx + grad_residual
    return narrow(dx, contract.rounding.input), x * scale[..., None]
