"""Row sum as `np.sum` does it over a contiguous float32 axis: halves down to 128 elements, then eight accumulators.

Source: NumPy's pairwise summation (Higham 1993, "The accuracy of floating point summation"), as of NumPy 2.3.
"""

from __future__ import annotations

import numpy as np

from reference.checks import Float32Array
from reference.reductions.step import Step, check_row, leaves

#: Longest run that is summed without halving.
RUN = 128
#: Accumulators of a run.
UNROLL = 8


def pairwise(x: Float32Array, *, step: Step = "add") -> Float32Array:
    """Halve the row, the left part a multiple of 8, until at most 128 elements are left; add the halves' sums.

    A run of at least 8 goes round-robin into 8 accumulators, which merge as ((0+1)+(2+3))+((4+5)+(6+7)), then takes its
    last elements one by one; a shorter one is a chain. The total joins +0. With `square`, the leaves are x * x with one
    rounding.

    Args:
        x: float32 [..., n], n >= 1.

    Returns:
        float32 [...].

    Raises:
        TypeError, ValueError: as `check_row`.
    """
    values = leaves(check_row(x, step), step)
    with np.errstate(all="ignore"):
        return np.asarray(_halve(values) + np.float32(0))


def _halve(x: Float32Array) -> Float32Array:
    n = x.shape[-1]
    if n <= RUN:
        return _run(x)
    left = n // 2 - n // 2 % UNROLL
    return np.asarray(_halve(x[..., :left]) + _halve(x[..., left:]))


def _run(x: Float32Array) -> Float32Array:
    n = x.shape[-1]
    total = np.full(x.shape[:-1], -0.0, np.float32)
    full = n - n % UNROLL
    if full:
        lanes = x[..., :UNROLL]
        for i in range(UNROLL, full, UNROLL):
            lanes = lanes + x[..., i : i + UNROLL]
        pairs = lanes[..., 0::2] + lanes[..., 1::2]
        total = (pairs[..., 0] + pairs[..., 1]) + (pairs[..., 2] + pairs[..., 3])
    for i in range(full, n):
        total = total + x[..., i]
    return np.asarray(total)
