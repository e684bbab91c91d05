"""The residual add: one float32 addition, one rounding."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import ResidualAddContract, residual_add
from reference.vectors.values import special
from tests.reference.exact import add, assert_same_bits, rnd

CONTRACT = ResidualAddContract()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equals_scalar_specification(dtype: str) -> None:
    x, y = special("add/x", (8, 64), dtype), special("add/y", (8, 64), dtype)
    expected = [rnd(add(a, b), dtype) for a, b in zip(x.ravel().tolist(), y.ravel().tolist(), strict=True)]
    assert_same_bits(residual_add(x, y, CONTRACT.with_dtype(dtype)).ravel(), np.array(expected, np.float32))


def test_overflow_and_ties() -> None:
    def one(a: float, b: float) -> float:
        x, y = np.array([[a]], np.float32), np.array([[b]], np.float32)
        return float(residual_add(x, y, CONTRACT)[0, 0])

    assert one(3.3895e38, 3e36) == np.inf  # finite in float32, beyond the largest bfloat16
    assert one(1.0, 2.0**-8) == 1.0 and one(1.0, 3 * 2.0**-8) == 1.015625  # ties go to even
    assert one(2.0**-133, 2.0**-134) == 2.0**-132  # subnormals of bfloat16


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="residual: shape"):
        residual_add(np.zeros((2, 4), np.float32), np.zeros((2, 5), np.float32), CONTRACT)
    with pytest.raises(TypeError, match="x: expected dtype float32, got float16"):
        residual_add(np.zeros((2, 4), np.float16), np.zeros((2, 4), np.float32), CONTRACT)  # type: ignore[arg-type]
