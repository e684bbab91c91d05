"""The paged cache: what is stored, what is read, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from reference.formats import FORMATS
from reference.operators import KvCacheContract, PagedKeyValues, empty_cache, from_cache, to_cache, write_cache
from reference.rounding import round_scalar
from tests.reference.exact import assert_same_bits, div, mul, random

CONTRACT = KvCacheContract()
FP8 = CONTRACT.override("rounding.storage", "float8_e4m3fn")


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_reads_back_what_was_written(page_size: int) -> None:
    length, table = 20, np.random.default_rng(1).permutation(24)[: -(-20 // page_size)].astype(np.int64)
    cache = empty_cache(24, page_size, 2, 4)
    keys, values = random(1, length, 2, 4), random(2, length, 2, 4)
    sequence = PagedKeyValues(cache, table, length, CONTRACT)
    write_cache(cache, sequence.slots(0, length), keys, values, CONTRACT)
    for start, stop in ((0, length), (5, 11), (7, 7)):
        got_keys, got_values = sequence.read(start, stop)
        assert_same_bits(got_keys, keys[start:stop])
        assert_same_bits(got_values, values[start:stop])


def test_unwritten_slots_are_nan() -> None:
    keys, _ = PagedKeyValues(empty_cache(2, 4, 1, 2), np.array([1]), 4, CONTRACT).read(0, 4)
    assert np.isnan(keys).all()


@pytest.mark.parametrize("storage", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"])
def test_fp8_equals_scalar_specification(storage: str) -> None:
    contract = CONTRACT.override("rounding.storage", storage)
    x = np.array([0.0, 0.1, -3.0, 100.0, 1e-4, 448.0, 1e6, -1e6], np.float32)
    for value, got in zip(x.tolist(), from_cache(to_cache(x, 0.3, contract), 0.3, contract).tolist(), strict=True):
        scale = float(np.float32(0.3))
        code = round_scalar(div(value, scale), FORMATS[storage], overflow="saturate")
        assert got == round_scalar(mul(code, scale), FORMATS["bfloat16"])


def test_fp8_overflow_policy() -> None:
    large = np.array([1e6], np.float32)
    assert to_cache(large, 1.0, FP8)[0] == 448
    assert np.isnan(to_cache(large, 1.0, FP8.override("rounding.overflow", "nan"))[0])


def test_bad_input() -> None:
    cache = empty_cache(2, 4, 1, 2)
    x = np.zeros((1, 1, 2), np.float32)
    with pytest.raises(ValueError, match=r"slots\[0\] = 8 is outside the cache \(0 to 7\)"):
        write_cache(cache, np.array([8]), x, x, CONTRACT)
    with pytest.raises(ValueError, match="one slot is written twice"):
        write_cache(cache, np.array([1, 1]), np.repeat(x, 2, axis=0), np.repeat(x, 2, axis=0), CONTRACT)
    with pytest.raises(ValueError, match=r"block_table\[1\] = 2 is outside the cache's pages"):
        PagedKeyValues(cache, np.array([0, 2]), 5, CONTRACT)
    with pytest.raises(ValueError, match="9 tokens do not fit in 2 blocks of 4 tokens"):
        PagedKeyValues(cache, np.array([0, 1]), 9, CONTRACT)
    with pytest.raises(ValueError, match="outside the 5 tokens"):
        PagedKeyValues(cache, np.array([0, 1]), 5, CONTRACT).read(0, 6)
    with pytest.raises(ValueError, match="page_size: must be at least 1"):
        empty_cache(2, 0, 1, 2)
    with pytest.raises(ValueError, match=r"rounding.overflow must stay 'saturate'"):
        CONTRACT.override("rounding.overflow", "nan")
