"""RoPE tables: correctly rounded at every step, and pinned by their hash."""

import mpmath
import numpy as np
import pytest

from reference.primitives import inverse_frequencies, rope_table
from reference.primitives.correctly_rounded import round_mpmath


def test_every_step_is_correctly_rounded() -> None:
    head_dim, theta = 64, 10_000.0
    frequencies = inverse_frequencies(head_dim, theta)
    table = rope_table(5000, head_dim, theta)
    rng = np.random.default_rng(0)
    for position, pair in zip(rng.integers(0, 5000, 150), rng.integers(0, head_dim // 2, 150), strict=True):
        with mpmath.workprec(200):
            exact = mpmath.mpf(theta) ** (-2 * mpmath.mpf(int(pair)) / head_dim)
        assert abs(float(frequencies[pair]) - float(exact)) <= np.spacing(frequencies[pair]) / 2 * (1 + 1e-7)
        angle = np.float32(position) * frequencies[pair]
        assert table.cos[position, pair] == round_mpmath(mpmath.cos, float(angle))
        assert table.sin[position, pair] == round_mpmath(mpmath.sin, float(angle))


def test_shape_origin_and_prefix() -> None:
    table, longer = rope_table(16, 128, 1e6), rope_table(64, 128, 1e6)
    assert table.cos.shape == table.sin.shape == (16, 64) and table.cos.dtype == np.float32
    assert (table.cos[0] == 1).all() and (table.sin[0] == 0).all()
    assert np.array_equal(longer.cos[:16], table.cos) and np.array_equal(longer.sin[:16], table.sin)


def test_hash_is_pinned() -> None:
    table = rope_table(4096, 128, 1e6)
    assert table.sha256 == "b2dd6c0f9cc873c177f987b6f5a54b24b434c29f500f13554299188657f69b86"
    assert rope_table(4095, 128, 1e6).sha256 != table.sha256


def test_tables_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        rope_table(4, 8, 1e4).cos[0, 0] = 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 1e4), r"^positions: expected 1 to 2\^24, got 0"),
        ((4, 7, 1e4), r"^head_dim: expected a positive even number, got 7"),
        ((4, 8, 1.0), r"^theta: expected a base above 1, got 1"),
    ],
)
def test_bad_arguments_name_themselves(arguments: tuple[int, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_table(*arguments)
