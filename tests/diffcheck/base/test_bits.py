"""Bit patterns: conversions lose nothing, NaN is one class, distances count representable values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcheck.base.bits import bits_tensor, canonical, compare, is_nan, ordinal, row_digests, tensor_bits, to_float32

EVERY_16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_16_bit_patterns_agree_with_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(EVERY_16.view(np.int16).copy()).view(getattr(torch, dtype))
    bits, name = tensor_bits(tensor)
    assert name == dtype and np.array_equal(bits, EVERY_16)
    nan = torch.isnan(tensor).numpy()
    assert np.array_equal(is_nan(bits, dtype), nan)
    wide = tensor.float().numpy()
    assert np.array_equal(to_float32(bits, dtype)[~nan].view(np.uint32), wide[~nan].view(np.uint32))
    assert np.array_equal(bits_tensor(bits, dtype, tensor).view(torch.int16).numpy(), EVERY_16.view(np.int16))


def test_ordinal_counts_representable_values() -> None:
    """Along the number line from -max to max, the position rises by one at every step, and both zeros share one."""
    finite = EVERY_16[~is_nan(EVERY_16, "bfloat16")]
    order = np.argsort(to_float32(finite, "bfloat16"), kind="stable")
    steps = np.diff(ordinal(finite[order]).astype(np.int64))
    assert sorted(np.flatnonzero(steps != 1)) == [np.flatnonzero(steps == 0)[0]]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_compare_agrees_with_the_definition(a: int, b: int) -> None:
    x, y = np.array([[a]], np.uint32), np.array([[b]], np.uint32)
    fx, fy = x.view(np.float32)[0, 0], y.view(np.float32)[0, 0]
    found = compare(x, "float32", y, "float32")
    same = a == b or (np.isnan(fx) and np.isnan(fy))
    assert found.equal == same
    if not same and not np.isnan(fx) and not np.isnan(fy):
        assert found.max_abs == abs(float(fx) - float(fy))
        assert found.max_ulp == abs(int(ordinal(x)[0, 0]) - int(ordinal(y)[0, 0]))
    if not same and (np.isnan(fx) or np.isnan(fy)):
        assert found.max_abs == float("inf")


def test_compare_finds_the_first_element_in_row_major_order() -> None:
    x = np.zeros((3, 4), np.uint16)
    y = x.copy()
    y[1, 3] = y[2, 0] = 1
    found = compare(x, "bfloat16", y, "bfloat16")
    assert (found.first, found.differing, found.rows.tolist()) == (7, 2, [False, True, True])


def test_nan_payload_and_sign_do_not_change_a_digest() -> None:
    a, b = np.array([[0x7FC0, 1]], np.uint16), np.array([[0xFF81, 1]], np.uint16)
    assert np.array_equal(row_digests(a, "bfloat16"), row_digests(b, "bfloat16"))
    assert canonical(b, "bfloat16").tolist() == [[0x7FC0, 1]]


def test_any_other_bit_changes_a_digest() -> None:
    base = np.array([[0x3F80, 0x0000, 0x8000]], np.uint16)
    for index in range(3):
        for bit in range(16):
            other = base.copy()
            other[0, index] ^= 1 << bit
            assert not np.array_equal(row_digests(base, "bfloat16"), row_digests(other, "bfloat16"))
