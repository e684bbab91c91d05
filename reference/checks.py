"""Checks of array arguments, shared by every function of the reference: an error names the argument and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]


def require_dtype(array: Any, argument: str, *dtypes: type[np.generic]) -> NDArray[Any]:
    """`array` itself when it is a NumPy array or NumPy scalar, of one of `dtypes`, in native byte order.

    Raises:
        TypeError: not a NumPy array or scalar, another dtype, or another byte order. Nothing is cast.
    """
    if not isinstance(array, np.ndarray | np.generic):
        raise TypeError(
            f"{argument}: expected a NumPy array of {_names(dtypes)}, got {type(array).__name__}; convert it explicitly"
        )
    if not array.dtype.isnative:
        raise TypeError(
            f"{argument}: byte order of {array.dtype.str} is not native; convert: a.astype(a.dtype.newbyteorder('='))"
        )
    if array.dtype.type not in dtypes:
        raise TypeError(f"{argument}: expected dtype {_names(dtypes)}, got {array.dtype.name}; convert it explicitly")
    return np.asarray(array)


def _names(dtypes: tuple[type[np.generic], ...]) -> str:
    return " or ".join(np.dtype(dtype).name for dtype in dtypes)


def require_float32(array: Any, argument: str) -> Float32Array:
    """`array` itself when it is a native float32 array or scalar.

    Raises:
        TypeError: as `require_dtype`.
    """
    return require_dtype(array, argument, np.float32)


def require_choice(value: str, argument: str, allowed: tuple[str, ...]) -> None:
    """Check a setting with a finite set of names.

    Raises:
        ValueError: `value` is none of `allowed`.
    """
    if value not in allowed:
        raise ValueError(f"{argument}: {value!r} is unknown; choose one of {', '.join(allowed)}")
