"""Sums of partial values in a balanced tree of adjacent pairs: the merge that every portable contract uses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.checks import Float32Array


def pairs_tree(x: Float32Array) -> Float32Array:
    """Sum over the last axis, adding adjacent pairs until one value is left; an odd last value passes through.

    Args:
        x: float32 [..., n], n >= 1.

    Returns:
        float32 [...].
    """
    while x.shape[-1] > 1:
        even = x.shape[-1] & ~1
        with np.errstate(all="ignore"):
            sums = x[..., 0:even:2] + x[..., 1:even:2]
        x = np.concatenate([sums, x[..., even:]], axis=-1)
    return x[..., 0]


def halving_tree(x: Float32Array) -> Float32Array:
    """Sum over the last axis, adding the upper half to the lower half until one value is left: a warp shuffle.

    Args:
        x: float32 [..., n], n a power of two.

    Returns:
        float32 [...].

    Raises:
        ValueError: n is not a power of two.
    """
    if x.shape[-1] < 1 or x.shape[-1] & (x.shape[-1] - 1):
        raise ValueError(f"x: the last axis must be a power of two, got {x.shape[-1]}")
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        with np.errstate(all="ignore"):
            x = x[..., :half] + x[..., half:]
    return x[..., 0]


def merge_tree(parts: Sequence[Float32Array]) -> Float32Array:
    """Balanced tree of adjacent pairs over equal-shaped partial arrays.

    Raises:
        ValueError: no parts, or parts of different shapes.
    """
    if not parts or len({part.shape for part in parts}) > 1:
        raise ValueError(f"parts: expected arrays of one shape, got {[part.shape for part in parts]}")
    return pairs_tree(np.stack(parts, axis=-1))


def binary_counter(parts: Sequence[Float32Array]) -> Float32Array:
    """The same sum as `merge_tree` for 2^k parts, with k + 1 live accumulators: how a kernel keeps it in registers.

    After part i arrives, as many merges happen as i + 1 has trailing zeros, like the carries of a binary counter.

    Raises:
        ValueError: the number of parts is not a power of two.
    """
    if not parts or len(parts) & (len(parts) - 1):
        raise ValueError(f"parts: their number must be a power of two, got {len(parts)}")
    stack: list[Float32Array] = []
    for arrived, part in enumerate(parts, start=1):
        merged = part
        while arrived % 2 == 0:
            with np.errstate(all="ignore"):
                merged = stack.pop() + merged
            arrived //= 2
        stack.append(merged)
    return stack[0]
