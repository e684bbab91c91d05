"""Mixture of experts: routing and combination, specification only."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import MoeCombineContract, MoeRouterContract, moe_combine, moe_router
from tests.reference.exact import fma, random, rnd

LOGITS = random(1, 6, 16, fmt="float32", scale=2.0)


@pytest.mark.parametrize("softmax", ["before_top_k", "after_top_k"])
def test_router_chooses_and_weighs(softmax: str) -> None:
    experts, weights = moe_router(LOGITS, 4, MoeRouterContract().override("order.softmax", softmax))
    p = np.exp(LOGITS.astype(np.float64))
    for t in range(6):
        assert experts[t].tolist() == np.argsort(-LOGITS[t], kind="stable")[:4].tolist()
        chosen = p[t, experts[t]]
        assert np.abs(weights[t] - chosen / chosen.sum()).max() < 1e-6


def test_router_ties_take_the_lowest_index() -> None:
    assert moe_router(np.zeros((1, 5), np.float32), 2, MoeRouterContract()).experts.tolist() == [[0, 1]]


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
    with pytest.raises(ValueError, match="k: must be 1 to 16, the number of experts, got 17"):
        moe_router(LOGITS, 17, MoeRouterContract())
    with pytest.raises(ValueError, match="NaN has no rank"):
        moe_router(np.full((1, 4), np.nan, np.float32), 1, MoeRouterContract())
    with pytest.raises(TypeError, match="experts: expected a NumPy array of integers"):
        outputs, weights = np.zeros((1, 2, 3), np.float32), np.zeros((1, 2), np.float32)
        moe_combine(outputs, weights, weights, MoeCombineContract())
