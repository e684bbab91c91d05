"""What the names of contract fields stand for: the parameters that a name carries are those that it computes with."""

from __future__ import annotations

import numpy as np
import pytest

from reference import reductions
from reference.operators import _numerics as numerics
from reference.operators._arguments import index_array
from reference.primitives import PRIMITIVES
from tests.reference.exact import assert_same_bits, random

#: More elements than any order has lanes, and a number that fills none of them.
ROWS = random(1, 3, 2311, fmt="float32", scale=3.0)


@pytest.mark.parametrize("name", numerics.ROW_ORDERS)
@pytest.mark.parametrize("step", ["add", "square"])
def test_a_row_order_has_the_numbers_of_its_name(name: str, step: str) -> None:
    numbers = [int(n) for n in name.replace("x", "-").split("-") if n.isdigit()]
    options: dict[str, int] = {}
    if name.startswith("lanes-tree"):
        function, options = reductions.lanes_tree, {"lanes": numbers[0]}
    elif name.startswith("warp-shuffle"):
        function, options = reductions.warp_shuffle, {"warp": numbers[0], "warps": numbers[1]}
    elif name.startswith("cascade"):
        function, options = reductions.cascade, {"width": numbers[0], "registers": numbers[1]}
    elif name.startswith("vector"):
        function, options = reductions.strided_vector, {"width": numbers[0], "registers": numbers[1]}
    elif name.startswith("lanes-"):
        function, options = reductions.warp_shuffle, {"warp": numbers[0], "warps": 1}
    else:
        function = reductions.chain
    got = numerics.row_sum(ROWS, name) if step == "add" else numerics.row_sum_squares(ROWS, name, "fma", "float32")
    assert_same_bits(got, function(ROWS, step=step, **options))  # type: ignore[operator]


def test_a_short_row_is_a_chain_where_the_name_says_so() -> None:
    for size in (1, 7, 15, 16, 17):
        row = ROWS[:, :size]
        expected = reductions.chain(row) if size < 16 else reductions.warp_shuffle(row, warp=16, warps=1)
        assert_same_bits(numerics.row_sum(row, "lanes-16-or-chain"), expected)


def test_the_sum_of_nothing_is_positive_zero() -> None:
    for name in numerics.ROW_ORDERS:
        assert_same_bits(numerics.row_sum(np.zeros((2, 0), np.float32), name), np.zeros(2, np.float32))


def test_squares_are_rounded_before_they_are_added() -> None:
    squares = numerics.narrow(ROWS * ROWS, "bfloat16")
    got = numerics.row_sum_squares(ROWS, "chain", "mul_add", "bfloat16")
    assert_same_bits(got, reductions.chain(squares))


def test_silu_as_a_product() -> None:
    x = random(2, 500, fmt="float32", scale=4.0)
    assert_same_bits(numerics.silu(x, "x * sigmoid(x)"), x * PRIMITIVES["sigmoid"]["rlk"](x))
    assert np.abs(numerics.silu(x, "x * sigmoid(x)") - numerics.silu(x, "rlk")).max() < 1e-5


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("ascending", [0, 1, 2, 3, 4]),
        ("descending", [4, 3, 2, 1, 0]),
        ("even_odd", [0, 2, 4, 1, 3]),
        ("pairs_odd_first", [1, 0, 3, 2, 4]),
    ],
)
def test_orders_of_the_reduction_axis(order: str, expected: list[int]) -> None:
    assert np.arange(5)[numerics.k_order(5, order)].tolist() == expected
    assert sorted(np.arange(64)[numerics.k_order(64, order)].tolist()) == list(range(64))


@pytest.mark.parametrize("given", [[1, 2], np.array([1.0, 2.0]), np.array([1, 2], ">i8"), np.array([True])])
def test_indices_are_native_integers(given: object) -> None:
    with pytest.raises(TypeError, match="where: expected a native NumPy array of integers"):
        index_array(given, "where", "tokens", 5, "the table")
