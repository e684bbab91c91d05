"""Bit patterns: how tensors become unsigned integers, how rows are hashed, how two of them are compared.

Everything that decides "equal" works on integers; NaN is one class, whatever its payload and sign. Floats appear only
in the statistics of a difference already found.
"""

from __future__ import annotations

import functools
import hashlib
from concurrent.futures import ThreadPoolExecutor
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
#: hashlib gives up the interpreter's lock for inputs of this size, so that a second thread helps.
_HASH_WITHOUT_LOCK = 2048
_WORTH_A_THREAD = 128 << 10


def uint_type(dtype: str) -> type[np.unsignedinteger[Any]]:
    """Unsigned integer type that holds the patterns of ``dtype``.

    Raises:
        ValueError: ``dtype`` is not one of `DTYPES`.
    """
    if dtype not in _UINT:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    return _UINT[dtype]


def tensor_bits(tensor: Any) -> tuple[UIntArray, str]:
    """Bit patterns of a torch tensor, a NumPy float32 array or one of bfloat16 patterns (uint16), on the host, with the
    dtype's name. The tensor is not modified.

    Raises:
        ValueError: the dtype is not one of `DTYPES`.
    """
    if isinstance(tensor, np.ndarray):
        if tensor.dtype == np.uint16:
            return np.array(tensor, order="C"), "bfloat16"
        if tensor.dtype != np.float32:
            raise ValueError(f"array of {tensor.dtype}: NumPy has float32, and patterns of bfloat16 as uint16")
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
        return (bits if like.dtype == np.uint16 else bits.view(np.float32)).reshape(like.shape)
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
    step = rows.shape[1] * rows.itemsize
    data = rows.reshape(-1).view(np.uint8).data
    if step < _HASH_WITHOUT_LOCK or rows.nbytes < _WORTH_A_THREAD:
        joined = _hash_rows(data, step)
    else:
        half = rows.shape[0] // 2 * step
        second = _second_hasher().submit(_hash_rows, data[half:], step)
        joined = _hash_rows(data[:half], step) + second.result()
    return np.frombuffer(joined, np.uint8).reshape(rows.shape[0], DIGEST_BYTES)


def _hash_rows(data: memoryview, step: int) -> bytes:
    return b"".join([hashlib.sha256(data[i : i + step]).digest() for i in range(0, len(data), step)])


@functools.cache
def _second_hasher() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rlk-digest")


def digest_of_rows(digests: npt.NDArray[np.uint8]) -> str:
    """SHA-256 of a boundary: the hash of its rows' hashes in (sample, position) order, so every trace level has the
    same one.
    """
    return hashlib.sha256(np.ascontiguousarray(digests).data).hexdigest()


def ordinal(bits: UIntArray) -> npt.NDArray[np.signedinteger[Any]]:
    """Position on the number line counted in representable values: adjacent floats differ by 1, and -0 equals +0.

    Signed integers of the patterns' own width. A negative float's magnitude grows against the integer order, so its
    magnitude bits are inverted and 1 is added.
    """
    signed = bits.view(np.dtype(f"i{bits.itemsize}"))
    sign = signed >> signed.dtype.type(8 * bits.itemsize - 1)
    return np.asarray((signed ^ (sign & signed.dtype.type(np.iinfo(signed.dtype).max))) - sign)


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
    left, right, dtype = _alike(left, left_dtype, right, right_dtype)
    unequal = np.asarray(left != right)
    nan = None
    if unequal.any():
        left_nan, right_nan = is_nan(left, dtype), is_nan(right, dtype)
        if left_nan.any() or right_nan.any():
            unequal &= ~(left_nan & right_nan)
            nan = left_nan | right_nan
    rows = np.asarray(unequal.any(axis=1), dtype=np.bool_)
    if not rows.any():
        return Difference(unequal.size, 0, 0.0, 0, -1, rows)
    return Difference(
        elements=unequal.size,
        differing=int(np.count_nonzero(unequal)),
        max_abs=float("inf") if nan is not None and (nan & unequal).any() else _max_abs(left, right, dtype),
        max_ulp=_max_ulp(left, right, nan),
        first=int(unequal.argmax()),
        rows=rows,
    )


def _alike(left: UIntArray, left_dtype: str, right: UIntArray, right_dtype: str) -> tuple[UIntArray, UIntArray, str]:
    """Both in one dtype: their own, or float32, to which every format widens exactly."""
    if left_dtype == right_dtype:
        return left, right, left_dtype
    return to_float32(left, left_dtype).view(np.uint32), to_float32(right, right_dtype).view(np.uint32), "float32"


def ulp_distance(left: UIntArray, left_dtype: str, right: UIntArray, right_dtype: str) -> npt.NDArray[np.int64]:
    """Representable values between each pair of elements, in the dtype that `compare` compares in: 0 where they have
    the same value, or are both NaN; -1 where only one is NaN.
    """
    left, right, dtype = _alike(left, left_dtype, right, right_dtype)
    gap = np.abs(ordinal(left).astype(np.int64) - ordinal(right).astype(np.int64))
    left_nan, right_nan = is_nan(left, dtype), is_nan(right, dtype)
    gap[left_nan & right_nan] = 0
    gap[left_nan != right_nan] = -1
    return gap


def _max_abs(left: UIntArray, right: UIntArray, dtype: str) -> float:
    """Largest |left - right|, exact in float64: rounding is monotone, so the float32 differences find the place."""
    with np.errstate(invalid="ignore", over="ignore"):
        gap = to_float32(left, dtype) - to_float32(right, dtype)
    np.abs(gap, out=gap)
    # fmax passes over the NaN that equal infinities and pairs of NaN give.
    at = int((gap == np.fmax.reduce(gap, axis=None)).argmax())
    a, b = (float(to_float32(side.reshape(-1)[at : at + 1], dtype)[0]) for side in (left, right))
    return abs(a - b)


def _max_ulp(left: UIntArray, right: UIntArray, nan: BoolArray | None) -> int:
    gap = np.subtract(ordinal(left), ordinal(right), dtype=np.dtype(f"i{2 * left.itemsize}"))
    np.abs(gap, out=gap)
    if nan is not None:
        gap[nan] = 0
    return int(gap.max(initial=0))
