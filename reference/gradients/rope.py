"""Gradient of rotary position embedding: the rotation by the opposite angle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators.rope import Domain, RopeContract, RopeTable, rope


@dataclass(frozen=True)
class Rounding(Group):
    input: str = format_choice("bfloat16", "rounds the gradient of the input to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    rotate: str = choice(
        ("fma_cos", "mul_add", "fma_sin"),
        {
            "fma_cos": "rounds the sine product, then fuses the cosine product with the add",
            "mul_add": "rounds both products, then adds",
            "fma_sin": "rounds the cosine product, then fuses the sine product with the add",
        },
    )


@dataclass(frozen=True)
class RopeBackwardContract(Contract):
    """(da, db) -> (da cos + db sin, db cos - da sin), with the table of the forward pass"""

    operator: ClassVar[str] = "rope_backward"
    domain: Domain = Domain()  # noqa: RUF009 - frozen
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()


def rope_backward(grad: Float32Array, table: RopeTable, contract: RopeBackwardContract) -> Float32Array:
    """Gradient of the input, [tokens, heads, head_dim].

    Args:
        grad: float32, [tokens, heads, head_dim].
        table: one row per token, as the forward pass had it.

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument.
    """
    rotation = RopeContract().replace(
        {
            "domain.pairing": contract.domain.pairing,
            "rounding.output": contract.rounding.input,
            "primitives.rotate": contract.primitives.rotate,
        }
    )
    return rope(grad, RopeTable(table.cos, -table.sin), rotation)
