"""exp in float32, as a fixed sequence of FMA: at most 0.891 ulp from the exact value."""

from __future__ import annotations

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.primitives.elementwise import elementwise, float32_constant, horner, scale_by_power_of_two

LOG2_E = float32_constant("0x1.715476p0")
#: Adding and subtracting it rounds to an integer: 1.5 * 2^23.
TO_INTEGER = float32_constant("0x1.8p23")
#: -ln 2 in two parts (Cody and Waite): the high part times any integer in range is exact.
MINUS_LN2_HIGH = float32_constant("-0x1.62e400p-1")
MINUS_LN2_LOW = float32_constant("-0x1.7f7d1cp-20")
COEFFICIENTS = tuple(
    float32_constant(c)
    for c in ("0x1.6a4d60p-10", "0x1.12398ep-7", "0x1.5558b0p-5", "0x1.555492p-3", "0x1.fffffcp-2", "1", "1")
)
OVERFLOW = float32_constant("0x1.62e430p6")
UNDERFLOW = float32_constant("-0x1.9fe36ap6")


@elementwise
def exp(x: Float32Array) -> Float32Array:
    """e^x for float32 `x` of any shape: Inf above 0x1.62e430p6, +0 below -0x1.9fe36ap6, NaN for NaN."""
    reduced = np.clip(x, UNDERFLOW, OVERFLOW)
    shifted = fused_multiply_add(reduced, LOG2_E, TO_INTEGER)
    k = shifted - TO_INTEGER
    r = fused_multiply_add(k, MINUS_LN2_HIGH, reduced)
    r = fused_multiply_add(k, MINUS_LN2_LOW, r)
    n = np.where(np.isnan(k), np.float32(0), k).astype(np.int32)
    result = scale_by_power_of_two(horner(COEFFICIENTS, r), n)
    result = np.where(x > OVERFLOW, np.float32(np.inf), result)
    return np.where(x < UNDERFLOW, np.float32(0), result)
