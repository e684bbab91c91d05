"""Gradients of SwiGLU (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array, same_shape
from reference.operators._numerics import EXPS, exp, narrow, quiet


@dataclass(frozen=True)
class Order(Group):
    gate: str = choice(
        ("(dy*up)*slope", "dy*(up*slope)"),
        {
            "(dy*up)*slope": "multiplies the gradient by up first and by SiLU's slope second",
            "dy*(up*slope)": "multiplies up by SiLU's slope first",
        },
    )


@dataclass(frozen=True)
class Rounding(Group):
    input: str = format_choice("bfloat16", "rounds the gradients of gate and up to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    exp: str = choice(EXPS, "computes exp as {value}")


@dataclass(frozen=True)
class SwigluBackwardContract(Contract):
    """d = 1 + exp(-gate);  s = 1 / d;  slope = s * fma(gate, 1 - s, 1)
    dgate = (dy * up) * slope;  dup = dy * (gate / d)"""

    operator: ClassVar[str] = "swiglu_backward"
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()


@quiet()
def swiglu_backward(
    grad: Float32Array, gate: Float32Array, up: Float32Array, contract: SwigluBackwardContract
) -> tuple[Float32Array, Float32Array]:
    """Gradients of gate and up, elementwise on [tokens, features].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument.
    """
    grad = float_array(grad, "grad", "tokens, features")
    for name, part in (("gate", gate), ("up", up)):
        same_shape(float_array(part, name, "tokens, features"), name, grad, "grad")
    one, output = np.float32(1), contract.rounding.input
    below = one + exp(-gate, contract.primitives.exp)
    s = one / below
    slope = s * fused_multiply_add(gate, one - s, np.ones_like(gate))
    of_gate = (grad * up) * slope if contract.order.gate == "(dy*up)*slope" else grad * (up * slope)
    return narrow(of_gate, output), narrow(grad * (gate / below), output)
