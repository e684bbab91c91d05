"""What the operator tests share: comparison of bits, and a slow scalar arithmetic in exact fractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.formats import FLOAT32, FORMATS
from reference.rounding import round_scalar


def bits(x: NDArray[Any]) -> NDArray[np.uint32]:
    """Bit patterns of float32 values, every NaN as one class."""
    assert x.dtype == np.float32
    u = np.ascontiguousarray(x).view(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7FC00000), u)


def assert_same_bits(left: NDArray[Any], right: NDArray[Any]) -> None:
    """Equal shapes and equal bits, NaN as a class."""
    assert left.shape == right.shape
    differing = np.argwhere(bits(left) != bits(right))
    assert not len(differing), f"{len(differing)} of {left.size} differ, first at {differing[0]}: {left.flat[0]}"


def same_bits(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Whether all bits are equal, NaN as a class."""
    return left.shape == right.shape and bool((bits(left) == bits(right)).all())


def rnd(x: float | Fraction, fmt: str = "float32") -> float:
    """``x`` rounded to nearest even in ``fmt``, through exact fractions."""
    return round_scalar(x, FORMATS[fmt])


def fma(a: float, b: float, c: float) -> float:
    """a * b + c with one rounding to float32, through exact fractions."""
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            return float(np.float32(a) * np.float32(b) + np.float32(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        # IEEE 754: an exact zero sum is +0 unless both terms are -0
        product_negative = math.copysign(1, a) * math.copysign(1, b) < 0
        both_negative = (a == 0 or b == 0) and product_negative and math.copysign(1, c) < 0 and c == 0
        return -0.0 if both_negative else 0.0
    return round_scalar(exact, FLOAT32)


def add(a: float, b: float) -> float:
    """a + b with one rounding to float32."""
    return fma(a, 1.0, b)


def mul(a: float, b: float) -> float:
    """a * b with one rounding to float32."""
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return a * b
    return math.copysign(round_scalar(Fraction(a) * Fraction(b), FLOAT32), math.copysign(1, a) * math.copysign(1, b))


def div(a: float, b: float) -> float:
    """a / b with one rounding to float32, for finite a and finite nonzero b."""
    return round_scalar(Fraction(a) / Fraction(b), FLOAT32)


def tree(values: Sequence[float]) -> float:
    """Adjacent-pair tree."""
    level = list(values)
    while len(level) > 1:
        pairs = [add(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def lanes_tree(values: Sequence[float], lanes: int = 256) -> float:
    """Lanes in ascending chunks, then the tree over lanes."""
    width = min(lanes, 1 << (len(values).bit_length() - 1))
    lane = [0.0] * width
    for i, value in enumerate(values):
        lane[i % width] = add(lane[i % width], value)
    return tree(lane)


def chain_dot(a: Sequence[float], b: Sequence[float], start: float = 0.0) -> float:
    """One FMA per k."""
    total = start
    for x, y in zip(a, b, strict=True):
        total = fma(x, y, total)
    return total


def one(function: Any, x: float) -> float:
    """A vectorised primitive applied to one number."""
    return float(function(np.array([x], np.float32))[0])


def random(seed: int, *shape: int, fmt: str = "bfloat16", scale: float = 1.0) -> NDArray[np.float32]:
    """Normal values of a format."""
    from reference.rounding import round_to

    x = np.random.default_rng(seed).standard_normal(shape) * scale
    return round_to(x, FORMATS[fmt])
