"""Rotary position embedding (Su et al. 2021): the table of cosines and sines, and the rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from numpy.typing import NDArray

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array, index_array, positive
from reference.operators._numerics import TABLES, narrow, quiet, trigonometric_table
from reference.primitives import RopeParameters

MAX_POSITION = 1 << 24  # beyond it, float32 no longer holds every position


@dataclass(frozen=True)
class Domain(Group):
    pairing: str = choice(
        ("halves", "interleaved"),
        {
            "halves": "rotates feature i with feature i + head_dim/2",
            "interleaved": "rotates feature 2i with feature 2i + 1",
        },
        given=True,
    )


@dataclass(frozen=True)
class Precision(Group):
    table: str = format_choice("float32", "keeps the cos/sin table in float32", "casts the cos/sin table to {value}")


@dataclass(frozen=True)
class Rounding(Group):
    product: str = format_choice(
        "float32", "keeps the products with cos and sin in float32", "rounds each product with cos or sin to {value}"
    )
    output: str = format_choice("bfloat16", "rounds the rotated features to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    table: str = choice(TABLES, "makes the table by {value}")
    rotate: str = choice(
        ("fma_cos", "mul_add", "fma_sin"),
        {
            "fma_cos": "rounds the sine product, then fuses the cosine product with the add",
            "mul_add": "rounds both products, then adds",
            "fma_sin": "rounds the cosine product, then fuses the sine product with the add",
        },
    )


@dataclass(frozen=True)
class RopeContract(Contract):
    """angle = fp32(position * inv_freq[i]), inv_freq[i] = theta^(-2i/head_dim)
    (a, b) -> (a cos - b sin, b cos + a sin)"""

    operator: ClassVar[str] = "rope"
    domain: Domain = Domain()
    precision: Precision = Precision()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        if self.rounding.product != "float32" and self.primitives.rotate != "mul_add":
            raise ValueError("rope: rounding.product must be float32 where an FMA keeps one product unrounded")


class RopeTable(NamedTuple):
    """``cos`` and ``sin``, float32, [tokens, head_dim / 2]."""

    cos: Float32Array
    sin: Float32Array


def rope_table(
    positions: NDArray[Any], head_dim: int, theta: float | RopeParameters, contract: RopeContract
) -> RopeTable:
    """The table rows of ``positions``, in the contract's precision.

    Args:
        positions: integers, [tokens], counted from the start of each sequence.
        head_dim: features of a head that are rotated.
        theta: base, or all parameters of a scaled table.

    Raises:
        TypeError, ValueError: positions not integers or negative; head_dim odd; theta not above zero.
    """
    where = index_array(positions, "positions", "tokens", MAX_POSITION, "the exactly representable positions")
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim: must be even and above 0, got {head_dim}")
    positive(theta.theta if isinstance(theta, RopeParameters) else theta, "theta")
    cos, sin = trigonometric_table(where, head_dim, theta, contract.primitives.table)
    return RopeTable(narrow(cos, contract.precision.table), narrow(sin, contract.precision.table))


def rope(x: Float32Array, table: RopeTable, contract: RopeContract) -> Float32Array:
    """Rotate every head of every token.

    Args:
        x: float32, [tokens, heads, head_dim].
        table: one row per token, from :func:`rope_table` with the same contract. Where it is made for fewer features
            than a head has, the features behind those stay as they are.

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument.
    """
    x = float_array(x, "x", "tokens, heads, head_dim")
    tokens, half = x.shape[0], min(x.shape[2] // 2, table.cos.shape[-1])
    cos = float_array(table.cos, "table.cos", f"tokens={tokens}, half={half}")[:, None, :]
    sin = float_array(table.sin, "table.sin", f"tokens={tokens}, half={half}")[:, None, :]
    first, second = _pairs(x[..., : 2 * half], contract.domain.pairing)
    out = x.copy()
    out_first, out_second = _pairs(out[..., : 2 * half], contract.domain.pairing)
    with quiet():
        out_first[...] = _rotate(first, cos, -second, sin, contract)
        out_second[...] = _rotate(second, cos, first, sin, contract)
    return out


def _pairs(x: Float32Array, pairing: str) -> tuple[Float32Array, Float32Array]:
    """Views of the first and second members of the rotated pairs."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if pairing == "halves" else (x[..., ::2], x[..., 1::2])


def _rotate(
    a: Float32Array, cos: Float32Array, b: Float32Array, sin: Float32Array, contract: RopeContract
) -> Float32Array:
    """a * cos + b * sin."""
    product, output = contract.rounding.product, contract.rounding.output
    match contract.primitives.rotate:
        case "fma_cos":
            return narrow(fused_multiply_add(a, cos, b * sin), output)
        case "fma_sin":
            return narrow(fused_multiply_add(b, sin, a * cos), output)
        case _:
            return narrow(narrow(a * cos, product) + narrow(b * sin, product), output)
