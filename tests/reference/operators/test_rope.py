"""RoPE: the table's meaning, and the rotation against a scalar specification."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import RopeContract, RopeTable, rope, rope_table
from tests.reference.exact import assert_same_bits, fma, mul, random, rnd

CONTRACT = RopeContract()
POSITIONS = np.array([0, 1, 5, 1000], np.int64)
UNFUSED = CONTRACT.replace({"primitives.rotate": "mul_add", "rounding.product": "bfloat16"})


def scalar_rotation(a: float, b: float, cos: float, sin: float, contract: RopeContract) -> float:
    """a cos - b sin."""
    fmt, product = contract.rounding.output, contract.rounding.product
    match contract.primitives.rotate:
        case "fma_cos":
            return rnd(fma(a, cos, -mul(b, sin)), fmt)
        case "fma_sin":
            return rnd(fma(-b, sin, mul(a, cos)), fmt)
        case _:
            return rnd(fma(rnd(mul(a, cos), product), 1.0, -rnd(mul(b, sin), product)), fmt)


@pytest.mark.parametrize("contract", [CONTRACT, CONTRACT.override("primitives.rotate", "fma_sin"), UNFUSED])
@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_equals_scalar_specification(contract: RopeContract, pairing: str) -> None:
    contract = contract.override("domain.pairing", pairing)
    x, table = random(1, 4, 2, 8), rope_table(POSITIONS, 8, 1e4, contract)
    got = rope(x, table, contract)
    for t, h, i in np.ndindex(4, 2, 4):
        first, second = (i, i + 4) if pairing == "halves" else (2 * i, 2 * i + 1)
        a, b = float(x[t, h, first]), float(x[t, h, second])
        cos, sin = float(table.cos[t, i]), float(table.sin[t, i])
        assert got[t, h, first] == scalar_rotation(a, b, cos, sin, contract)
        assert got[t, h, second] == scalar_rotation(b, -a, cos, sin, contract)


def test_position_zero_rotates_nothing_and_rotation_keeps_length() -> None:
    x = random(2, 4, 3, 64)
    y = rope(x, rope_table(POSITIONS, 64, 1e6, CONTRACT), CONTRACT)
    assert_same_bits(y[0], x[0])
    assert np.allclose(np.linalg.norm(x, axis=2), np.linalg.norm(y, axis=2), rtol=2**-7)


def test_table_is_correctly_rounded_from_the_float32_angle() -> None:
    table = rope_table(POSITIONS, 64, 1e6, CONTRACT)
    inv_freq = np.array([1e6 ** (-2 * i / 64) for i in range(32)], np.float32)
    angle = (POSITIONS.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    assert_same_bits(table.cos, np.cos(angle).astype(np.float32))
    assert_same_bits(table.sin, np.sin(angle).astype(np.float32))


def test_a_position_does_not_depend_on_the_others() -> None:
    alone = rope_table(POSITIONS[2:3], 32, 1e6, CONTRACT)
    assert_same_bits(alone.cos[0], rope_table(POSITIONS, 32, 1e6, CONTRACT).cos[2])


@pytest.mark.parametrize(
    ("positions", "head_dim", "theta", "error", "message"),
    [
        (np.array([-1]), 8, 1e4, ValueError, r"positions\[0\] = -1"),
        (np.array([1 << 24]), 8, 1e4, ValueError, "exactly representable positions"),
        (np.array([0.5]), 8, 1e4, TypeError, "positions: expected a native NumPy array of integers"),
        (POSITIONS, 7, 1e4, ValueError, "head_dim: must be even"),
        (POSITIONS, 8, -1.0, ValueError, "theta: must be finite and above 0"),
    ],
)
def test_bad_table(positions: object, head_dim: int, theta: float, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rope_table(positions, head_dim, theta, CONTRACT)  # type: ignore[arg-type]


def test_bad_rotation() -> None:
    table = RopeTable(np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match=r"table.cos: axis 0 \(tokens\) must be 4"):
        rope(random(1, 4, 2, 8), table, CONTRACT)
    with pytest.raises(ValueError, match="keeps one product unrounded"):
        CONTRACT.override("rounding.product", "bfloat16")
