"""Inputs that make an order of operations, a rounding or a special value visible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.formats import FORMATS
from reference.rounding import round_to

#: Kinds of values.
KINDS = ("normal", "wide", "cancelling", "subnormal", "signed_zero", "infinity", "nan")


def values(kind: str, shape: tuple[int, ...], dtype: str, seed: int) -> Float32Array:
    """float32 values of ``shape``, each exact in ``dtype`` ("bfloat16" or "float32").

    normal: standard normal. wide: exponents over 48 binades. cancelling: neighbours along the last axis nearly cancel.
    subnormal: products around the smallest normal value and below. signed_zero: mostly zeros of both signs. infinity,
    nan: normal with a few of those.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "wide":
        x = np.ldexp(x, rng.integers(-24, 24, shape)).astype(np.float32)
    elif kind == "cancelling":
        x = np.ldexp(x, rng.integers(-4, 12, shape)).astype(np.float32)
        odd = x[..., 1::2]
        odd[...] = -x[..., 0 : 2 * odd.shape[-1] : 2] * (1 + np.float32(2**-7) * rng.integers(-1, 2, odd.shape))
    elif kind == "subnormal":
        x = np.ldexp(x, rng.integers(-70, -56, shape)).astype(np.float32)
        x[rng.random(shape) < 0.1] *= np.float32(2.0**-66)
    elif kind == "signed_zero":
        x = np.where(rng.random(shape) < 0.9, np.copysign(np.float32(0), x), np.ldexp(x, -74)).astype(np.float32)
    elif kind == "infinity":
        x[rng.random(shape) < 0.01] = np.inf
        x[rng.random(shape) < 0.01] = -np.inf
    elif kind == "nan":
        x[rng.random(shape) < 0.005] = np.nan
    elif kind != "normal":
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    return x if dtype == "float32" else round_to(x, FORMATS[dtype])


def sample(rng: np.random.Generator, size: int, count: int) -> NDArray[np.int64]:
    """Sorted distinct indices below ``size``: all of them if there are at most ``count``, else both ends and others."""
    if size <= count:
        return np.arange(size)
    inner = rng.choice(np.arange(1, size - 1), count - 2, replace=False)
    return np.sort(np.concatenate([[0, size - 1], inner])).astype(np.int64)
