"""Floating-point formats: their parameters, and the bit patterns of their values.

Values travel as float32 arrays, since every format here is a subset of float32; `encode` and `decode` convert between
those values and the bit patterns a device stores. Rounding to a format is `reference.rounding`.

Sources: IEEE 754-2019 (float32, float16); Intel's bfloat16 numerics definition; NVIDIA's TF32; OCP 8-bit floating point
specification 1.0 (e4m3fn, e5m2); Noune et al. 2022 for the `fnuz` encoding that gfx942 uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array, require_dtype, require_float32

#: Which bit patterns are NaN. `ieee`: exponent all ones and mantissa not zero. `all-ones`: only S.11..1.
#: `negative-zero`: only 1.00..0, the pattern that would have been -0.
NanEncoding = Literal["ieee", "all-ones", "negative-zero"]


#: Elements encoded at a time, so that the temporaries stay in cache.
BLOCK = 16384


@dataclass(frozen=True)
class Format:
    """One floating-point format: sign, then exponent, then mantissa, from the most significant bit down."""

    #: Name as torch spells it.
    name: str
    #: Bits of the exponent field.
    exponent_bits: int
    #: Bits of the mantissa field, without the implicit one.
    mantissa_bits: int
    #: Exponent field of the value 1.0.
    bias: int
    #: Which bit patterns are NaN; only `ieee` leaves room for infinities.
    nan: NanEncoding = "ieee"

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Width of a bit pattern, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def has_infinity(self) -> bool:
        """Whether the format can hold an infinity."""
        return self.nan == "ieee"

    @property
    def has_negative_zero(self) -> bool:
        """Whether the format tells -0 from +0."""
        return self.nan != "negative-zero"

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value, which subnormals share."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """Bit pattern of the largest finite value."""
        reserved = {"ieee": 1 << self.mantissa_bits, "all-ones": 1, "negative-zero": 0}[self.nan]
        return (1 << (self.bits - 1)) - 1 - reserved

    @property
    def nan_code(self) -> int:
        """Bit pattern of the canonical NaN, sign bit clear where the format has a choice (IEEE: the quiet NaN)."""
        if self.nan == "negative-zero":
            return 1 << (self.bits - 1)
        return self.max_code + 1 + (1 << (self.mantissa_bits - 1) if self.nan == "ieee" else 0)

    @property
    def max_finite(self) -> float:
        """Largest finite value."""
        return decode_scalar(self.max_code, self)

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value, and the spacing of the subnormals."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def storage(self) -> type[np.unsignedinteger[Any]]:
        """Unsigned integer type that holds one bit pattern, right-aligned."""
        return np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32


FLOAT32 = Format("float32", 8, 23, 127)
BFLOAT16 = Format("bfloat16", 8, 7, 127)
FLOAT16 = Format("float16", 5, 10, 15)
TFLOAT32 = Format("tfloat32", 8, 10, 127)
FLOAT8_E4M3FN = Format("float8_e4m3fn", 4, 3, 7, "all-ones")
FLOAT8_E4M3FNUZ = Format("float8_e4m3fnuz", 4, 3, 8, "negative-zero")
FLOAT8_E5M2 = Format("float8_e5m2", 5, 2, 15)

#: Every format by its name.
FORMATS: dict[str, Format] = {
    fmt.name: fmt for fmt in (FLOAT32, BFLOAT16, FLOAT16, TFLOAT32, FLOAT8_E4M3FN, FLOAT8_E4M3FNUZ, FLOAT8_E5M2)
}


def decode_scalar(code: int, fmt: Format) -> float:
    """Value of one bit pattern: the specification that `decode` must equal.

    Raises:
        ValueError: `code` does not fit in the format's width.
    """
    if not 0 <= code < 1 << fmt.bits:
        raise ValueError(f"code: {code:#x} does not fit in the {fmt.bits} bits of {fmt.name}")
    sign = -1.0 if code >> (fmt.bits - 1) else 1.0
    magnitude = code & ((1 << (fmt.bits - 1)) - 1)
    if fmt.nan == "negative-zero" and sign < 0 and magnitude == 0:
        return float("nan")
    if magnitude > fmt.max_code:
        is_infinity = fmt.has_infinity and magnitude == fmt.max_code + 1
        return sign * float("inf") if is_infinity else float("nan")
    exponent, mantissa = divmod(magnitude, 1 << fmt.mantissa_bits)
    if exponent == 0:
        return sign * float(mantissa) * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    return sign * float(2**fmt.mantissa_bits + mantissa) * 2.0 ** (exponent - fmt.bias - fmt.mantissa_bits)


def decode(bits: NDArray[Any], fmt: Format) -> Float32Array:
    """Values of the bit patterns `bits`, as float32; exact. Every NaN becomes the canonical one of its sign.

    Args:
        bits: any shape, dtype `fmt.storage`, patterns right-aligned.

    Raises:
        TypeError: `bits` is not an array of `fmt.storage` in native byte order.
        ValueError: a pattern does not fit in the format's width (tfloat32 only).
    """
    codes = require_dtype(bits, "bits", fmt.storage)
    if fmt.bits <= 16:
        return np.asarray(_decode_table(fmt)[codes], np.float32)
    shift = np.uint32(23 - fmt.mantissa_bits)
    if codes.size and int(codes.max()) >> fmt.bits:
        raise ValueError(f"bits: a pattern does not fit in the {fmt.bits} bits of {fmt.name}")
    return canonical_nan(np.asarray(codes << shift, np.uint32).view(np.float32))


def encode(x: Float32Array, fmt: Format) -> NDArray[Any]:
    """Bit patterns of float32 values that `fmt` represents; NaN takes the canonical pattern of its sign.

    Args:
        x: float32, any shape.

    Returns:
        dtype `fmt.storage`, the shape of `x`.

    Raises:
        TypeError: `x` is not a native float32 array.
        ValueError: some value is not in the format: nothing is rounded here, `reference.rounding.round_to` rounds.
    """
    values = require_float32(x, "x")
    flat = np.ascontiguousarray(values).reshape(-1)
    result = np.empty(flat.shape, fmt.storage)
    for start in range(0, flat.size, BLOCK):
        result[start : start + BLOCK] = _encode_block(canonical_nan(flat[start : start + BLOCK]), fmt)
    return result.reshape(values.shape)


def _encode_block(x: Float32Array, fmt: Format) -> NDArray[Any]:
    """Codes of a one-dimensional block whose NaN are canonical."""
    u = x.view(np.uint32)
    if fmt.exponent_bits == 8:  # same exponent field as float32: the pattern is a prefix
        dropped = np.uint32(23 - fmt.mantissa_bits)
        codes = u >> dropped
        wrong = codes << dropped != u
    else:
        magnitude = u & np.uint32(0x7FFFFFFF)
        codes = _narrow_magnitude(magnitude, fmt)
        codes |= (u ^ magnitude) >> np.uint32(32 - fmt.bits)
        if not fmt.has_negative_zero:
            codes = np.where(magnitude > 0x7F800000, np.uint32(fmt.nan_code), codes)
        codes = codes.astype(fmt.storage)
        # the one NaN of the format without -0 decodes as positive
        wrong = (decode(codes, fmt).view(np.uint32) != u) & ~((codes == fmt.nan_code) & np.isnan(x))
    if wrong.any():
        first = float(x[wrong][0])
        raise ValueError(f"x: {first!r} is not a {fmt.name} value; round it first with reference.rounding.round_to")
    return codes.astype(fmt.storage)


def _narrow_magnitude(magnitude: NDArray[np.uint32], fmt: Format) -> NDArray[np.uint32]:
    """Codes without sign of float32 magnitudes, for formats with less exponent range than float32.

    What the format does not hold gets some code in its range, which then fails the round trip.
    """
    rebias = np.uint32((127 - fmt.bias) << fmt.mantissa_bits)
    codes = (magnitude >> np.uint32(23 - fmt.mantissa_bits)) - rebias
    smallest = np.float32(fmt.min_normal).view(np.uint32)
    is_subnormal = magnitude < smallest
    if is_subnormal.any():
        tiny = np.where(is_subnormal, magnitude.view(np.float32), np.float32(0)) / np.float32(fmt.min_subnormal)
        codes = np.where(is_subnormal, tiny.astype(np.uint32), codes)
    is_large = magnitude > np.float32(fmt.max_finite).view(np.uint32)
    if is_large.any():
        is_infinity = (magnitude == 0x7F800000) & np.bool_(fmt.has_infinity)
        codes = np.where(is_large, np.where(is_infinity, np.uint32(fmt.max_code + 1), np.uint32(fmt.nan_code)), codes)
    return np.asarray(codes, np.uint32)


def canonical_nan(x: Float32Array) -> Float32Array:
    """`x` with every NaN replaced by the quiet NaN without payload, of the same sign; `x` itself if it has none."""
    is_nan = np.isnan(x)
    if not is_nan.any():
        return x
    return np.asarray(np.where(is_nan, np.copysign(np.float32(np.nan), x), x), np.float32)


@cache
def _decode_table(fmt: Format) -> Float32Array:
    values = np.array([decode_scalar(code, fmt) for code in range(1 << fmt.bits)], np.float32)
    sign = np.arange(1 << fmt.bits) >> (fmt.bits - 1)
    if fmt.has_negative_zero:  # `nan` carries no sign through Python arithmetic
        values = np.copysign(values, np.where(sign == 1, np.float32(-1), np.float32(1)))
    else:
        values = np.where(np.isnan(values), np.float32(np.nan), values)
    values.setflags(write=False)
    return values
