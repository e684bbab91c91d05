"""Correctly rounded float32 functions: the float64 value, and mpmath where that value is too close to a tie.

They state what a contract means by `correctly-rounded`, whatever the accuracy of the C library below NumPy: Ziv's test
with a margin of 2^-44, 512 units in the last place of float64, decides which elements mpmath must settle.

Source: Ziv 1991, "Fast evaluation of elementary mathematical functions with correctly rounded last bit".
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.formats import FLOAT32
from reference.primitives.elementwise import Primitive, elementwise
from reference.rounding import round_scalar

#: Relative error that the float64 evaluation may have.
MARGIN = 2.0**-44
#: Bits of the mpmath evaluation: the hardest float32 cases of these functions need about 24 + 149 of them.
PRECISION = 320

Float64Function = Callable[[NDArray[np.float64]], NDArray[np.float64]]
ExactFunction = Callable[[Any], Any]


def correctly_rounded(in_float64: Float64Function, in_mpmath: ExactFunction, name: str, formula: str) -> Primitive:
    """The float32 primitive that returns `in_mpmath` rounded to nearest even.

    Args:
        in_float64: the function to a relative error below 2^-44; it defines infinities, NaN and signed zeros.
        in_mpmath: the same function of an mpmath number.
    """

    def kernel(x: Float32Array) -> Float32Array:
        return round_with_ziv_test(in_float64(x.astype(np.float64)), x, in_mpmath)

    kernel.__name__ = name
    kernel.__doc__ = f"{formula} of float32 `x` of any shape, correctly rounded to nearest even."
    return elementwise(kernel)


def round_with_ziv_test(approximation: NDArray[np.float64], x: Float32Array, in_mpmath: ExactFunction) -> Float32Array:
    """`approximation` of `in_mpmath(x)` rounded to float32, decided by mpmath where 2^-44 of error could matter."""
    with np.errstate(all="ignore"):
        result = approximation.astype(np.float32)
        below = (approximation * (1 - MARGIN)).astype(np.float32)
        above = (approximation * (1 + MARGIN)).astype(np.float32)
    for index in np.flatnonzero((below != above) & np.isfinite(approximation)):
        result.flat[index] = round_mpmath(in_mpmath, float(x.flat[index]))
    return result


def round_mpmath(function: ExactFunction, x: float) -> np.float32:
    """`function(x)` evaluated by mpmath with 320 bits, rounded once to float32."""
    with mpmath.workprec(PRECISION):
        sign, mantissa, exponent, _ = function(mpmath.mpf(x))._mpf_
    magnitude = Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
    return np.float32(round_scalar(-magnitude if sign else magnitude, FLOAT32))


exp_correctly_rounded = correctly_rounded(np.exp, mpmath.exp, "exp_correctly_rounded", "e^x")
exp2_correctly_rounded = correctly_rounded(np.exp2, lambda x: mpmath.mpf(2) ** x, "exp2_correctly_rounded", "2^x")
log_correctly_rounded = correctly_rounded(np.log, mpmath.log, "log_correctly_rounded", "ln(x)")
rsqrt_correctly_rounded = correctly_rounded(
    lambda x: 1 / np.sqrt(x), lambda x: 1 / mpmath.sqrt(x), "rsqrt_correctly_rounded", "1 / sqrt(x)"
)
sigmoid_correctly_rounded = correctly_rounded(
    lambda x: 1 / (1 + np.exp(-x)), lambda x: 1 / (1 + mpmath.exp(-x)), "sigmoid_correctly_rounded", "1 / (1 + e^-x)"
)
silu_correctly_rounded = correctly_rounded(
    lambda x: x / (1 + np.exp(-x)), lambda x: x / (1 + mpmath.exp(-x)), "silu_correctly_rounded", "x / (1 + e^-x)"
)
