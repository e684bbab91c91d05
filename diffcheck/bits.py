"""Bit patterns: how tensors become unsigned integers, how rows are hashed, how two of them are compared.

Everything that decides "equal" works on integers; NaN is one class, whatever its payload and sign. Floats appear only
in the statistics of a difference already found.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

UIntArray = npt.NDArray[np.unsignedinteger[Any]]
BoolArray = npt.NDArray[np.bool_]

#: Float formats a boundary may have: bits of the exponent and of the mantissa.
_LAYOUT = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}
_UINT: dict[str, type[np.unsignedinteger[Any]]] = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
DTYPES = tuple(_LAYOUT)
DIGEST_BYTES = 32


def uint_type(dtype: str) -> type[np.unsignedinteger[Any]]:
    """Unsigned integer type that holds the patterns of ``dtype``.

    Raises:
        ValueError: ``dtype`` is not one of `DTYPES`.
    """
    if dtype not in _UINT:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    return _UINT[dtype]


def tensor_bits(tensor: Any) -> tuple[UIntArray, str]:
    """Bit patterns of a torch tensor or NumPy float32 array, on the host, with the dtype's name. The tensor is not
    modified.

    Raises:
        ValueError: the dtype is not one of `DTYPES`.
    """
    if isinstance(tensor, np.ndarray):
        if tensor.dtype != np.float32:
            raise ValueError(f"array of {tensor.dtype}: NumPy values are observed as float32")
        return np.array(tensor, order="C").view(np.uint32), "float32"
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = uint_type(dtype)
    view = torch.int32 if kind is np.uint32 else torch.int16
    # A copy, always: engines reuse their buffers in place after the hook returns.
    host = tensor.detach().contiguous().view(view).to("cpu", copy=True)
    return host.numpy().view(kind), dtype


def bits_tensor(bits: UIntArray, dtype: str, like: Any) -> Any:
    """Inverse of `tensor_bits`: a tensor of ``like``'s kind, device and shape with the given patterns."""
    if isinstance(like, np.ndarray):
        return bits.view(np.float32).reshape(like.shape)
    import torch

    signed = np.ascontiguousarray(bits).view(np.int32 if dtype == "float32" else np.int16)
    return torch.from_numpy(signed.copy()).view(getattr(torch, dtype)).reshape(like.shape).to(like.device)


def to_float32(bits: UIntArray, dtype: str) -> npt.NDArray[np.float32]:
    """Exact values as float32 (every format here is a subset of it)."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view(np.float32)


def is_nan(bits: UIntArray, dtype: str) -> BoolArray:
    """Which patterns are NaN."""
    exponent, mantissa = _LAYOUT[dtype]
    infinity = bits.dtype.type(((1 << exponent) - 1) << mantissa)
    magnitude = bits & bits.dtype.type((1 << (exponent + mantissa)) - 1)
    return np.asarray(magnitude > infinity, dtype=np.bool_)


def canonical(bits: UIntArray, dtype: str) -> UIntArray:
    """The same patterns with every NaN replaced by the positive quiet one, so that NaN compares and hashes as one
    class.
    """
    nan = is_nan(bits, dtype)
    if not nan.any():
        return bits
    exponent, mantissa = _LAYOUT[dtype]
    quiet = bits.dtype.type((((1 << exponent) - 1) << mantissa) | (1 << (mantissa - 1)))
    return np.where(nan, quiet, bits)


def row_digests(bits: UIntArray, dtype: str) -> npt.NDArray[np.uint8]:
    """SHA-256 of each row's canonical patterns, little-endian: [rows, width] -> [rows, 32]."""
    rows = np.ascontiguousarray(canonical(bits, dtype))
    out = np.empty((rows.shape[0], DIGEST_BYTES), np.uint8)
    step = rows.shape[1] * rows.itemsize
    data = rows.reshape(-1).view(np.uint8).data
    sha = hashlib.sha256
    for i in range(rows.shape[0]):
        out[i] = np.frombuffer(sha(data[i * step : (i + 1) * step]).digest(), np.uint8)
    return out


def digest_of_rows(digests: npt.NDArray[np.uint8]) -> str:
    """SHA-256 of a boundary: the hash of its rows' hashes in (sample, position) order, so every trace level has the
    same one.
    """
    return hashlib.sha256(np.ascontiguousarray(digests).data).hexdigest()


def ordinal(bits: UIntArray, dtype: str) -> npt.NDArray[np.int64]:
    """Position on the number line counted in representable values: adjacent floats differ by 1, and -0 equals +0."""
    exponent, mantissa = _LAYOUT[dtype]
    magnitude = (bits & bits.dtype.type((1 << (exponent + mantissa)) - 1)).astype(np.int64)
    return np.where((bits >> bits.dtype.type(exponent + mantissa)) != 0, -magnitude, magnitude)


@dataclass(frozen=True)
class Difference:
    """Statistics of one pair of arrays of the same shape. ``max_ulp`` counts representable values of the dtype
    compared in.
    """

    elements: int
    differing: int
    max_abs: float
    max_ulp: int
    #: Row-major flat index of the first differing element, or -1.
    first: int
    #: Which rows hold at least one differing element: [rows].
    rows: BoolArray

    @property
    def equal(self) -> bool:
        return self.differing == 0


def compare(left: UIntArray, left_dtype: str, right: UIntArray, right_dtype: str) -> Difference:
    """Compare two [rows, width] arrays of patterns.

    Unequal dtypes are compared after the exact widening to float32, which can neither hide nor make a difference of
    value. A NaN against a number counts as differing, with infinite absolute and no ulp distance.
    """
    if left_dtype != right_dtype:
        left = to_float32(left, left_dtype).view(np.uint32)
        right = to_float32(right, right_dtype).view(np.uint32)
    dtype = left_dtype if left_dtype == right_dtype else "float32"
    unequal = np.asarray(left != right)
    if unequal.any():
        both_nan = is_nan(left, dtype) & is_nan(right, dtype)
        unequal &= ~both_nan
    rows = np.asarray(unequal.any(axis=1), dtype=np.bool_)
    if not rows.any():
        return Difference(unequal.size, 0, 0.0, 0, -1, rows)
    a, b = left[unequal], right[unequal]
    numbers = ~(is_nan(a, dtype) | is_nan(b, dtype))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(to_float32(a, dtype).astype(np.float64) - to_float32(b, dtype).astype(np.float64))
    max_abs = float("inf") if not numbers.all() else float(gap.max())
    ulp = np.abs(ordinal(a[numbers], dtype) - ordinal(b[numbers], dtype))
    return Difference(
        elements=unequal.size,
        differing=int(np.count_nonzero(unequal)),
        max_abs=max_abs,
        max_ulp=int(ulp.max()) if ulp.size else 0,
        first=int(np.flatnonzero(unequal)[0]),
        rows=rows,
    )
