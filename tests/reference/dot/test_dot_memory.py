"""A product that is remembered has the bits of one that is computed, and nobody can change it for the next caller."""

from __future__ import annotations

import numpy as np
import pytest

from reference.dot import UNITS, dot, remember
from reference.dot.memory import recalled


@pytest.mark.parametrize("unit", UNITS)
def test_the_bits_are_the_same(unit: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-9, 9, shape).astype(np.float32) for shape in ((3, 32), (32, 5)))
    c = rng.standard_normal((3, 5), np.float32)
    fmt = "float16" if "float16" in UNITS[unit].input_formats else "bfloat16"
    computed = dot(a, b, c, unit=unit, input_format=fmt)
    with remember():
        for _ in range(2):
            again = dot(a, b, c, unit=unit, input_format=fmt)
            np.testing.assert_array_equal(again.view(np.uint32), computed.view(np.uint32))
            again[...] = np.nan


def test_it_is_computed_once_for_the_same_bits_only() -> None:
    calls = 0

    def compute() -> np.ndarray:
        nonlocal calls
        calls += 1
        return np.full((1, 1), calls, np.float32)

    zero, minus_zero = np.zeros((1, 1), np.float32), np.full((1, 1), -0.0, np.float32)
    with remember():
        for operands in ((zero, zero, zero), (zero, zero, zero), (zero, zero, minus_zero), (zero, minus_zero, zero)):
            recalled("unit", operands, compute)
        assert calls == 3
        recalled("other unit", (zero, zero, zero), compute)
    recalled("unit", (zero, zero, zero), compute)
    assert calls == 5
