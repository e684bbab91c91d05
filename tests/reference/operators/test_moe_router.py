"""Routing of a mixture of experts, specification only."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import MoeRouterContract, moe_router
from tests.reference.exact import random

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


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="k: must be 1 to 16, the number of experts, got 17"):
        moe_router(LOGITS, 17, MoeRouterContract())
    with pytest.raises(ValueError, match="NaN has no rank"):
        moe_router(np.full((1, 4), np.nan, np.float32), 1, MoeRouterContract())
