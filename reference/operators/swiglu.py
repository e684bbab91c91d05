"""SwiGLU: the gated activation of the MLP (Shazeer 2020, "GLU variants improve Transformer")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array, same_shape
from reference.operators._numerics import SILUS, narrow, quiet, silu


@dataclass(frozen=True)
class Rounding(Group):
    silu: str = format_choice(
        "float32", "keeps silu(gate) in float32 up to the multiply", "rounds silu(gate) to {value} before the multiply"
    )
    output: str = format_choice("bfloat16", "rounds the product to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    silu: str = choice(SILUS, "computes SiLU as {value}")


@dataclass(frozen=True)
class SwigluContract(Contract):
    """y = silu(gate) * up, silu(x) = x / (1 + exp(-x))"""

    operator: ClassVar[str] = "swiglu"
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()


def swiglu(gate: Float32Array, up: Float32Array, contract: SwigluContract) -> Float32Array:
    """The gated activation, elementwise on [tokens, features].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument.
    """
    gate = float_array(gate, "gate", "tokens, features")
    up = float_array(up, "up", "tokens, features")
    same_shape(up, "up", gate, "gate")
    with quiet():
        activated = narrow(silu(gate, contract.primitives.silu), contract.rounding.silu)
        return narrow(activated * up, contract.rounding.output)
