"""1 / sqrt(x) in float32: IEEE square root and division, then one compensated Newton step."""

from __future__ import annotations

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.primitives.elementwise import elementwise

ONE = np.float32(1)


@elementwise
def rsqrt(x: Float32Array) -> Float32Array:
    """Reciprocal square root of float32 `x` of any shape: Inf of the sign for zeros, +0 for Inf, NaN below zero.

    h + l is x * y without error; the step adds y/2 * (1 - (h + l) * y). Not correctly rounded everywhere: the
    sequence of operations is the contract.
    """
    y = ONE / np.sqrt(x)
    high = x * y
    low = fused_multiply_add(x, y, -high)
    error = fused_multiply_add(-low, y, fused_multiply_add(-high, y, ONE))
    stepped = fused_multiply_add(np.float32(0.5) * y, error, y)
    return np.asarray(np.where(np.isfinite(x) & (x != 0), stepped, y), np.float32)


@elementwise
def rsqrt_uncompensated(x: Float32Array) -> Float32Array:
    """1 / sqrt(x) with two IEEE roundings and no correction, as C and PyTorch code writes it."""
    return np.asarray(ONE / np.sqrt(x), np.float32)
