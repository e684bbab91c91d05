"""The exponential of SLEEF's `expf_u10`, which PyTorch's vectorised CPU kernels call, and the SiLU they make of it.

Only to describe engines: softmax, log-softmax and SiLU on a CPU have these bits. Source: the sequence of operations of
SLEEF 3 (Shibata and Petrogalli 2020, "SLEEF: a portable vectorized library of C standard mathematical functions").
"""

from __future__ import annotations

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.primitives.elementwise import elementwise, float32_constant, horner, scale_by_power_of_two
from reference.primitives.exp import LOG2_E, MINUS_LN2_HIGH, MINUS_LN2_LOW

ONE = np.float32(1)
COEFFICIENTS = tuple(
    float32_constant(c)
    for c in ("0x1.a057b4p-13", "0x1.6d2d92p-10", "0x1.11114cp-7", "0x1.5554f4p-5", "0x1.555556p-3", "0x1p-1")
)
OVERFLOW = np.float32(100)
UNDERFLOW = np.float32(-104)


@elementwise
def exp_sleef(x: Float32Array) -> Float32Array:
    """e^x for float32 `x` of any shape, within 1 ulp: +0 below -104, Inf above 100 or where the scaling overflows."""
    reduced = np.clip(x, UNDERFLOW, OVERFLOW)
    k = np.rint(reduced * LOG2_E)
    r = fused_multiply_add(k, MINUS_LN2_HIGH, reduced)
    r = fused_multiply_add(k, MINUS_LN2_LOW, r)
    polynomial = ONE + fused_multiply_add(r * r, horner(COEFFICIENTS, r), r)
    n = np.where(np.isnan(k), np.float32(0), k).astype(np.int32)
    result = scale_by_power_of_two(polynomial, n)
    result = np.where(x > OVERFLOW, np.float32(np.inf), result)
    return np.where(x < UNDERFLOW, np.float32(0), result)


@elementwise
def silu_sleef(x: Float32Array) -> Float32Array:
    """x / (1 + e^-x) for float32 `x` of any shape, IEEE addition and division."""
    return x / (ONE + exp_sleef(-x))
