"""The fast exponential of vLLM's CPU attention: a polynomial of degree 5 around 0, about 20 ulp.

Only to describe that engine: its attention has been reproduced in bits with it (`docs/contracts.md`).
"""

from __future__ import annotations

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.primitives.elementwise import elementwise, float32_constant, horner, power_of_two

LOG2_E = float32_constant("0x1.715476p0")
MINUS_LN2 = float32_constant("-0x1.62e430p-1")
HALF = np.float32(0.5)
COEFFICIENTS = tuple(
    float32_constant(c)
    for c in ("0x1.0f9f9cp-7", "0x1.573a1ap-5", "0x1.555a80p-3", "0x1.fffdc6p-2", "0x1.fffff6p-1", "1")
)
#: Largest and smallest arguments: the logarithms of the largest and the smallest normal number.
GREATEST = float32_constant("0x1.62e430p6")
LEAST = float32_constant("-0x1.5d58a0p6")


@elementwise
def fast_exp(x: Float32Array) -> Float32Array:
    """e^x for float32 `x` of any shape: +0 below the logarithm of 2^-126, at most about 2^128; NaN for NaN."""
    reduced = np.clip(x, LEAST, GREATEST)
    k = np.floor(fused_multiply_add(reduced, LOG2_E, HALF))
    polynomial = horner(COEFFICIENTS, fused_multiply_add(k, MINUS_LN2, reduced))
    n = np.where(np.isnan(k), np.float32(0), k).astype(np.int32)
    # two factors, since 2^128 is no float32
    result = (polynomial * power_of_two(n - np.int32(1))) * np.float32(2)
    return np.where(x < LEAST, np.float32(0), result)
