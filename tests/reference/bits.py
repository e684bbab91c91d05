"""Comparison of bit patterns, and inputs that reach every exponent: shared by the tests of reference/."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]


def f32(values: Any) -> Float32Array:
    """A float32 array, without dimensions for a number."""
    return np.array(values, np.float32)


def assert_same_bits(ours: NDArray[Any], theirs: NDArray[Any], inputs: NDArray[Any] | None = None) -> None:
    """Equal dtype, shape and bit patterns; any NaN equals any other NaN."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (
        ours.dtype,
        theirs.dtype,
        ours.shape,
        theirs.shape,
    )
    unsigned = np.dtype(f"u{ours.itemsize}")
    different = np.ascontiguousarray(ours).view(unsigned) != np.ascontiguousarray(theirs).view(unsigned)
    if np.issubdtype(ours.dtype, np.floating):
        different &= ~(np.isnan(ours) & np.isnan(theirs))
    if different.any():
        where = tuple(np.argwhere(different)[0])
        source = "" if inputs is None else f", input {inputs[where]!r}"
        raise AssertionError(
            f"{different.sum()} of {ours.size} differ, first at {where}: {ours[where]!r} and {theirs[where]!r}{source}"
        )


def stratified(per_exponent: int = 64, seed: int = 0) -> Float32Array:
    """Float32 bit patterns of both signs and every exponent field: the edges of each binade, and random mantissas."""
    rng = np.random.default_rng(seed)
    edges = [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF]
    edges += [bit - d for bit in (1 << 12, 1 << 13, 1 << 15, 1 << 16, 1 << 19, 1 << 20, 1 << 21) for d in (-1, 0, 1)]
    random = rng.integers(0, 1 << 23, (512, per_exponent), dtype=np.uint32)
    mantissa = np.concatenate([np.tile(np.array(edges, np.uint32), (512, 1)), random], axis=1)
    field = np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23)
    return np.ascontiguousarray((field | mantissa).reshape(-1)).view(np.float32)


def random_patterns(count: int, seed: int = 0) -> Float32Array:
    """Uniformly random float32 bit patterns, NaN included."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint64)
    return bits.astype(np.uint32).view(np.float32)
