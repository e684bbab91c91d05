"""What one accumulation step adds to an accumulator: the value (`add`), or its square by FMA (`square`)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array, require_choice, require_float32

Step = Literal["add", "square"]
STEPS: tuple[str, ...] = get_args(Step)


def accumulate(accumulator: Float32Array, x: Float32Array, step: Step) -> Float32Array:
    """accumulator + x, or fma(x, x, accumulator); one rounding each."""
    with np.errstate(all="ignore"):
        return accumulator + x if step == "add" else fused_multiply_add(x, x, accumulator)


def accumulate_chain(x: Float32Array, step: Step) -> Float32Array:
    """Sequential accumulation over the second-to-last axis from +0: float32 [..., n, lanes] to [..., lanes]."""
    accumulator = np.zeros((*x.shape[:-2], x.shape[-1]), np.float32)
    for i in range(x.shape[-2]):
        accumulator = accumulate(accumulator, x[..., i, :], step)
    return accumulator


def leaves(x: Float32Array, step: Step) -> Float32Array:
    """What an order that adds pairs of leaves starts from: x, or x * x with one rounding."""
    with np.errstate(all="ignore"):
        return x if step == "add" else x * x


def pad_to_multiple(x: Float32Array, width: int) -> Float32Array:
    """`x` with +0 appended to the last axis up to a multiple of `width`.

    Exact for accumulators that start at +0, since they are never -0 and a square or a sum with +0 leaves them alone.
    """
    missing = -x.shape[-1] % width
    if not missing:
        return x
    return np.concatenate([x, np.zeros((*x.shape[:-1], missing), np.float32)], axis=-1)


def split_last(x: Float32Array, *sizes: int) -> Float32Array:
    """`x` with its last axis, a multiple of the sizes' product, cut into [rounds, *sizes].

    Not by -1: NumPy infers no length for an array without rows.
    """
    return x.reshape(*x.shape[:-1], x.shape[-1] // math.prod(sizes), *sizes)


def check_row(x: Float32Array, step: Step) -> Float32Array:
    """Check the arguments that all reductions share.

    Raises:
        TypeError: `x` is not a native float32 array.
        ValueError: `x` has no axis or an empty last axis, or `step` is unknown.
    """
    values = require_float32(x, "x")
    require_choice(step, "step", STEPS)
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"x: expected a last axis with at least one element, got shape {values.shape}")
    return values


def require_positive(value: int, argument: str) -> None:
    """Check a count.

    Raises:
        ValueError: `value` is below one.
    """
    if value < 1:
        raise ValueError(f"{argument}: expected at least 1, got {value}")


def require_power_of_two(value: int, argument: str) -> None:
    """Check a width of a tree.

    Raises:
        ValueError: `value` is not a power of two.
    """
    if value < 1 or value & (value - 1):
        raise ValueError(f"{argument}: expected a power of two, got {value}")
