"""exp2 for x <= 0, as attention needs it: no overflow, no subnormal result, one integer addition to scale."""

from __future__ import annotations

import numpy as np

from reference.checks import Float32Array
from reference.primitives.elementwise import elementwise, horner
from reference.primitives.exp2 import COEFFICIENTS, TO_INTEGER

#: At and below it the result is +0; the subnormal results of exp2 are not produced.
FLOOR = np.float32(-127)


@elementwise
def exp2_nonpositive(x: Float32Array) -> Float32Array:
    """2^x for float32 `x` <= 0 of any shape: exactly +0 from -127 down (-inf included), NaN for NaN.

    At most 0.800 ulp from -126 up. Between -127 and -126 the recipe below does not make subnormal numbers: its bits are
    the contract there, and they stay below 2^-126.

    The exponent is added to the bits of the polynomial: bits(result) = (bits(x + 1.5 * 2^23) << 23) + bits(polynomial).

    Raises:
        ValueError: some `x` is positive.
    """
    if (x > 0).any():
        raise ValueError("x: expected values <= 0, got a positive one; use exp2")
    reduced = np.maximum(x, FLOOR)
    shifted = reduced + TO_INTEGER
    fraction = reduced - (shifted - TO_INTEGER)
    polynomial = horner(COEFFICIENTS, fraction)
    bits = (shifted.view(np.uint32) << np.uint32(23)) + polynomial.view(np.uint32)
    result = np.where(reduced == FLOOR, np.float32(0), bits.view(np.float32))
    return np.where(np.isnan(x), x, result)
