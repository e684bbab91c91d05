"""all_reduce over virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import AllReduceContract, all_reduce
from tests.reference.exact import add, random, rnd, same_bits, tree

CONTRACT = AllReduceContract()


def ranks(count: int, *shape: int) -> list[np.ndarray]:
    return [random(i, *shape, fmt="float32") for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_tree_and_chain_equal_scalar_specification(count: int) -> None:
    parts = ranks(count, 2, 3)
    summed, chained = all_reduce(parts, CONTRACT), all_reduce(parts, CONTRACT.override("order.merge", "chain"))
    for index in np.ndindex(2, 3):
        values = [float(p[index]) for p in parts]
        assert summed[index] == np.float32(tree(values))
        total = values[0]
        for value in values[1:]:
            total = add(total, value)
        assert chained[index] == np.float32(total)


def test_ring_starts_each_chunk_at_another_rank() -> None:
    parts = ranks(4, 1, 8)
    got = all_reduce(parts, CONTRACT.override("order.merge", "ring"))
    for chunk in range(4):
        for column in (2 * chunk, 2 * chunk + 1):
            order = [(chunk + 1 + step) % 4 for step in range(4)]
            total = float(parts[order[0]][0, column])
            for rank in order[1:]:
                total = add(total, float(parts[rank][0, column]))
            assert got[0, column] == np.float32(total)


def test_orders_agree_on_two_ranks_only() -> None:
    for count, equal in ((2, True), (4, False)):
        parts = ranks(count, 4, 64)
        results = [all_reduce(parts, CONTRACT.override("order.merge", m)) for m in ("tree", "chain", "ring")]
        assert (same_bits(results[0], results[1]) and same_bits(results[0], results[2])) == equal


def test_bfloat16_transport_and_hops() -> None:
    parts = ranks(4, 1, 5)
    contract = CONTRACT.replace({"rounding.transport": "bfloat16", "rounding.hop": "bfloat16"})
    got = all_reduce(parts, contract)
    for column in range(5):
        a, b, c, d = (rnd(float(p[0, column]), "bfloat16") for p in parts)
        left, right = rnd(add(a, b), "bfloat16"), rnd(add(c, d), "bfloat16")
        assert got[0, column] == np.float32(rnd(add(left, right), "bfloat16"))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="partials: expected one array per rank, got none"):
        all_reduce([], CONTRACT)
    with pytest.raises(ValueError, match=r"partials\[1\]: shape \[2, 4\] differs from partials\[0\] \[2, 3\]"):
        all_reduce([np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)], CONTRACT)
