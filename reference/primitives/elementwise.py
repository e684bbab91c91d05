"""Shared parts of the primitives: application in cache-sized blocks, Horner's rule by FMA, scaling by powers of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array, require_float32

#: Elements evaluated at a time: measured fastest, four float64 temporaries fill a 1 MiB L2 cache.
BLOCK = 32768

Primitive = Callable[[Float32Array], Float32Array]


def float32_constant(hexadecimal: str) -> np.float32:
    """A float32 from C's hexadecimal notation, which must be exact."""
    value = float.fromhex(hexadecimal)
    if float(np.float32(value)) != value:
        raise ValueError(f"hexadecimal: {hexadecimal} is not a float32 value")
    return np.float32(value)


def elementwise(kernel: Primitive) -> Primitive:
    """Make a function of one-dimensional float32 blocks into one of float32 arrays of any shape.

    The result checks its argument (TypeError unless it is a native float32 array or scalar) and warns of nothing.
    """

    @wraps(kernel)
    def primitive(x: Float32Array) -> Float32Array:
        values = require_float32(x, "x")
        flat = np.ascontiguousarray(values).reshape(-1)
        result = np.empty_like(flat)
        with np.errstate(all="ignore"):
            for start in range(0, flat.size, BLOCK):
                result[start : start + BLOCK] = kernel(flat[start : start + BLOCK])
        return result.reshape(values.shape)

    return primitive


def horner(coefficients: Sequence[np.float32], x: Float32Array) -> Float32Array:
    """Polynomial with the highest coefficient first, one FMA per further coefficient."""
    argument = x.astype(np.float64)
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = fused_multiply_add(result.astype(np.float64), argument, coefficient)
    return result


def power_of_two(n: NDArray[np.int32]) -> Float32Array:
    """2^n as float32, for -126 <= n <= 127."""
    return ((n + np.int32(127)) << np.int32(23)).view(np.float32)


def scale_by_power_of_two(x: Float32Array, n: NDArray[np.int32]) -> Float32Array:
    """(x * 2^(n >> 1)) * 2^(n - (n >> 1)): two factors, for one rounding and no early overflow."""
    half = n >> np.int32(1)
    return (x * power_of_two(half)) * power_of_two(n - half)
