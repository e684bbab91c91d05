"""Combination of a mixture of experts, specification only."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import MoeCombineContract, moe_combine
from tests.reference.exact import fma, random, rnd


@pytest.mark.parametrize("order", ["expert_index", "rank"])
def test_combine_equals_scalar_specification(order: str) -> None:
    outputs, weights = random(1, 2, 3, 4), np.abs(random(2, 2, 3, fmt="float32"))
    experts = np.array([[5, 1, 3], [0, 2, 1]])
    got = moe_combine(outputs, weights, experts, MoeCombineContract().override("order.experts", order))
    for t, column in np.ndindex(2, 4):
        places = range(3) if order == "rank" else np.argsort(experts[t])
        total = 0.0
        for i in places:
            total = fma(float(outputs[t, i, column]), float(weights[t, i]), total)
        assert got[t, column] == np.float32(rnd(total, "bfloat16"))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="experts: expected a NumPy array of integers"):
        outputs, weights = np.zeros((1, 2, 3), np.float32), np.zeros((1, 2), np.float32)
        moe_combine(outputs, weights, weights, MoeCombineContract())
