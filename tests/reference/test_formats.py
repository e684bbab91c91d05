"""Formats: decode against its scalar specification and ml_dtypes over every code; encode as its inverse."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from reference.formats import (
    BFLOAT16,
    FLOAT8_E4M3FN,
    FLOAT8_E4M3FNUZ,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FORMATS,
    TFLOAT32,
    Format,
    decode,
    decode_scalar,
    encode,
)
from tests.reference.bits import assert_same_bits, f32, random_patterns, stratified

PEERS: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
NARROW = [fmt for fmt in FORMATS.values() if fmt.bits <= 16]


def all_codes(fmt: Format) -> np.ndarray[Any, Any]:
    return np.arange(1 << fmt.bits, dtype=np.uint32).astype(fmt.storage)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_decode_equals_scalar_specification(fmt: Format) -> None:
    codes = all_codes(fmt) if fmt.bits <= 16 else (stratified(4).view(np.uint32) >> (32 - fmt.bits)).astype(fmt.storage)
    expected = np.array([decode_scalar(int(code), fmt) for code in codes], np.float32)
    assert_same_bits(decode(codes, fmt), expected)


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_decode_equals_ml_dtypes_for_every_code(fmt: Format) -> None:
    codes = all_codes(fmt)
    assert_same_bits(decode(codes, fmt), codes.view(PEERS[fmt.name]).astype(np.float32))


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_encode_inverts_decode_for_every_code(fmt: Format) -> None:
    codes = all_codes(fmt)
    values = decode(codes, fmt)
    back = encode(values, fmt)
    is_nan = np.isnan(values)
    assert np.array_equal(back[~is_nan], codes[~is_nan])
    sign = codes & (1 << (fmt.bits - 1))
    canonical = fmt.nan_code | sign if fmt.has_negative_zero else np.full_like(codes, fmt.nan_code)
    assert np.array_equal(back[is_nan], canonical[is_nan])


@pytest.mark.parametrize("fmt", [FLOAT32, TFLOAT32], ids=str)
def test_encode_inverts_decode_on_wide_formats(fmt: Format) -> None:
    codes = (random_patterns(100_000).view(np.uint32) >> (32 - fmt.bits)).astype(np.uint32)
    values = decode(codes, fmt)
    keep = ~np.isnan(values)
    assert np.array_equal(encode(values, fmt)[keep], codes[keep])


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_limits_equal_those_of_ml_dtypes(fmt: Format) -> None:
    info = ml_dtypes.finfo(PEERS[fmt.name])  # type: ignore[no-untyped-call]
    assert fmt.max_finite == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)


def test_special_codes() -> None:
    assert (BFLOAT16.nan_code, FLOAT16.nan_code, FLOAT8_E5M2.nan_code) == (0x7FC0, 0x7E00, 0x7E)
    assert (FLOAT8_E4M3FN.nan_code, FLOAT8_E4M3FNUZ.nan_code, TFLOAT32.nan_code) == (0x7F, 0x80, 0x3FE00)
    assert not FLOAT8_E4M3FNUZ.has_negative_zero and not FLOAT8_E4M3FN.has_infinity and FLOAT8_E5M2.has_infinity


@pytest.mark.parametrize(
    ("value", "fmt"),
    [
        (1 + 2.0**-8, BFLOAT16),
        (65520.0, FLOAT16),
        (2.0**-25, FLOAT16),
        (480.0, FLOAT8_E4M3FN),
        (float("inf"), FLOAT8_E4M3FN),
        (-0.0, FLOAT8_E4M3FNUZ),
        (256.0, FLOAT8_E4M3FNUZ),
        (61440.0, FLOAT8_E5M2),
        (1 + 2.0**-11, TFLOAT32),
    ],
    ids=str,
)
def test_encode_refuses_what_the_format_lacks(value: float, fmt: Format) -> None:
    with pytest.raises(ValueError, match=rf"^x: .* is not a {fmt.name} value; round it first"):
        encode(f32([1.0, value]), fmt)


def test_bad_arguments_name_themselves() -> None:
    with pytest.raises(TypeError, match=r"^x: expected dtype float32, got float64"):
        encode(np.zeros(2), BFLOAT16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^x: byte order of >f4 is not native"):
        encode(np.zeros(2, ">f4"), BFLOAT16)
    with pytest.raises(TypeError, match=r"^x: expected a NumPy array of float32, got list"):
        encode([1.0], BFLOAT16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^bits: expected dtype uint16, got uint8"):
        decode(np.zeros(2, np.uint8), BFLOAT16)
    with pytest.raises(ValueError, match=r"^bits: a pattern does not fit in the 19 bits of tfloat32"):
        decode(np.array([1 << 19], np.uint32), TFLOAT32)
    with pytest.raises(ValueError, match=r"^code: 0x100 does not fit in the 8 bits of float8_e5m2"):
        decode_scalar(256, FLOAT8_E5M2)


def test_shapes_and_strides_are_kept() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    codes = encode(x.transpose(2, 0, 1), BFLOAT16)
    assert codes.shape == (4, 2, 3)
    assert_same_bits(decode(codes, BFLOAT16), np.ascontiguousarray(x.transpose(2, 0, 1)))
    assert encode(f32(1), BFLOAT16).shape == () and encode(np.zeros((0, 3), np.float32), FLOAT16).shape == (0, 3)
