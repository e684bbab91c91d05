"""Natural logarithm in float32, as a fixed sequence of FMA: at most 0.882 ulp from the exact value."""

from __future__ import annotations

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.primitives.elementwise import elementwise, float32_constant, horner

#: Bits of 2/3: subtracting them centres the significand on one.
TWO_THIRDS = np.int32(0x3F2AAAAB)
EXPONENT_FIELD = np.int32(-0x00800000)
SUBNORMAL_SCALE = np.float32(2.0**23)
LN2_HIGH = float32_constant("0x1.62e400p-1")
LN2_LOW = float32_constant("0x1.7f7d1cp-20")
COEFFICIENTS = tuple(
    float32_constant(c)
    for c in (
        "-0x1.07c894p-3",
        "0x1.1e678cp-3",
        "-0x1.f332f8p-4",
        "0x1.1ed662p-3",
        "-0x1.559c44p-3",
        "0x1.99d044p-3",
        "-0x1.fffefcp-3",
        "0x1.555506p-2",
        "-0x1p-1",
    )
)


@elementwise
def log(x: Float32Array) -> Float32Array:
    """ln(x) for float32 `x` of any shape: -Inf for either zero, NaN below zero and for NaN, Inf for Inf."""
    subnormal = x < np.float32(2.0**-126)
    positive = np.where(subnormal, x * SUBNORMAL_SCALE, x)
    scale = np.where(subnormal, np.float32(-23), np.float32(0))
    u = positive.view(np.int32)
    exponent = (u - TWO_THIRDS) & EXPONENT_FIELD
    f = (u - exponent).view(np.float32) - np.float32(1)
    e = fused_multiply_add(exponent.astype(np.float32), np.asarray(np.float32(2.0**-23)), scale)
    square = f * f
    polynomial = horner(COEFFICIENTS, f)
    high = e * LN2_HIGH
    total = high + f
    low = fused_multiply_add(e, LN2_LOW, f - (total - high))
    result = total + fused_multiply_add(polynomial, square, low)
    result = np.where(x == 0, np.float32(-np.inf), result)
    result = np.where((x < 0) | np.isnan(x), np.float32(np.nan), result)
    return np.where(x == np.float32(np.inf), x, result)
