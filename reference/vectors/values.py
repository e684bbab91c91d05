"""Test values that are the same for ever: bits from SHAKE-256 of a name, not from a library's random generator."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.formats import FORMATS
from reference.rounding import round_to

#: Zeros, subnormals, extremes, infinities and NaN of float32; rounding to a narrower format overflows the largest.
SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0**-149,
    -(2.0**-149),
    2.0**-133,
    1.5 * 2.0**-130,
    2.0**-126,
    -(2.0**-126),
    3.0e38,
    -3.0e38,
    3.4028234e38,
    math.inf,
    -math.inf,
    math.nan,
)


def words(name: str, count: int) -> NDArray[np.uint32]:
    """``count`` pseudo-random 32-bit words that depend on ``name`` alone."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(4 * count), "<u4").astype(np.uint32)


def normal(name: str, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Float32Array:
    """Values of about normal distribution (a sum of four uniforms), standard deviation ``scale``."""
    count = math.prod(shape)
    uniform = words(name, 4 * count).reshape(4, count).astype(np.float64) / 2**32 - 0.5
    # adding in a written-out order keeps the bits independent of the library's reductions
    total = ((uniform[0] + uniform[1]) + (uniform[2] + uniform[3])) * (scale * math.sqrt(3.0))
    return _in_format(total.reshape(shape), dtype)


def wide(name: str, shape: tuple[int, ...], dtype: str, exponents: int = 24) -> Float32Array:
    """Values whose exponents are spread over [-exponents, exponents]: sums of them cancel and absorb."""
    count = math.prod(shape)
    exponent = (words(f"{name}/exponent", count) % np.uint32(2 * exponents + 1)).astype(np.int64) - exponents
    return _in_format(np.ldexp(normal(name, (count,), "float32").astype(np.float64), exponent).reshape(shape), dtype)


def special(name: str, shape: tuple[int, ...], dtype: str) -> Float32Array:
    """Normal values, of which every third is one of ``SPECIAL``."""
    values = normal(name, shape, "float32").reshape(-1)
    draw = words(f"{name}/special", values.size)
    chosen = np.array(SPECIAL, np.float64)[(draw // 3) % len(SPECIAL)]
    return _in_format(np.where(draw % 3 == 0, chosen, values.astype(np.float64)).reshape(shape), dtype)


def special_values(dtype: str) -> Float32Array:
    """``SPECIAL`` rounded to ``dtype``."""
    return _in_format(np.array(SPECIAL, np.float64), dtype)


def integers(name: str, shape: tuple[int, ...], bound: int) -> NDArray[np.int64]:
    """Integers in [0, bound)."""
    return (words(name, math.prod(shape)) % np.uint32(bound)).astype(np.int64).reshape(shape)


def _in_format(x: NDArray[np.float64], dtype: str) -> Float32Array:
    return round_to(np.asarray(x, np.float64), FORMATS[dtype])
