"""Checks of operator arguments: dtype, byte order, shape, range. Nothing is cast."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array, require_float32


def float_array(array: Any, argument: str, axes: str) -> Float32Array:
    """``array`` if it is a native float32 array with as many axes as ``axes`` names ("tokens, hidden").

    An axis may be pinned to a size: "tokens, hidden=4096".

    Raises:
        TypeError: dtype or byte order.
        ValueError: number of axes, or a pinned axis of another size.
    """
    values = require_float32(array, argument)
    names = axes.split(", ")
    if values.ndim != len(names):
        raise ValueError(f"{argument}: expected shape [{axes}], got {list(values.shape)}")
    for axis, name in enumerate(names):
        label, _, size = name.partition("=")
        if size and values.shape[axis] != int(size):
            raise ValueError(f"{argument}: axis {axis} ({label}) must be {size}, got shape {list(values.shape)}")
    return values


def index_array(array: Any, argument: str, axis: str, bound: int, what: str) -> NDArray[np.int64]:
    """``array`` as int64 if it is a one-dimensional integer array with every value in [0, bound).

    Raises:
        TypeError: not a native integer array.
        ValueError: number of axes, or a value outside the range, with its index and value.
    """
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or not array.dtype.isnative:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{argument}: expected a native NumPy array of integers, got {kind}")
    if array.ndim != 1:
        raise ValueError(f"{argument}: expected shape [{axis}], got {list(array.shape)}")
    outside = np.flatnonzero((array < 0) | (array >= bound))
    if outside.size:
        where = int(outside[0])
        raise ValueError(f"{argument}[{where}] = {int(array[where])} is outside {what} (0 to {bound - 1})")
    return array.astype(np.int64)


def same_shape(array: Float32Array, argument: str, other: Float32Array, other_argument: str) -> None:
    """Raise ValueError unless both have one shape."""
    if array.shape != other.shape:
        raise ValueError(f"{argument}: shape {list(array.shape)} differs from {other_argument} {list(other.shape)}")


def positive(value: float, argument: str) -> None:
    """Raise ValueError unless ``value`` is finite and above zero."""
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"{argument}: must be finite and above 0, got {value!r}")
