"""SiLU (swish) in float32: x / (1 + exp(-x)), IEEE operations and this package's exp: at most 2.394 ulp."""

from __future__ import annotations

import numpy as np

from reference.checks import Float32Array
from reference.primitives.elementwise import elementwise
from reference.primitives.exp import exp

ONE = np.float32(1)


@elementwise
def silu(x: Float32Array) -> Float32Array:
    """x / (1 + e^-x) for float32 `x` of any shape: -0 where e^-x overflows for finite `x`, NaN for -Inf and NaN."""
    return x / (ONE + exp(-x))
