"""Routing of a mixture of experts, specification only."""

from __future__ import annotations

import numpy as np
import pytest

from reference.contract.base import from_json
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


def test_a_correction_bias_moves_the_choice_and_not_the_weight() -> None:
    bias = np.zeros(16, np.float32)
    bias[LOGITS[0].argmin()] = 100
    plain, moved = moe_router(LOGITS, 16, MoeRouterContract()), moe_router(LOGITS, 16, MoeRouterContract(), bias)
    assert moved.experts[0, 0] == LOGITS[0].argmin() != plain.experts[0, 0]
    dense = np.zeros((2, 16), np.float32)
    for row, one in enumerate((plain, moved)):
        dense[row, one.experts[0]] = one.weights[0]
    # Divided by a sum in another order: the same weights but for its rounding.
    assert np.abs(dense[0] - dense[1]).max() < 1e-6


def test_fields_added_later_leave_digests_in_use_alone() -> None:
    plain = MoeRouterContract()
    assert plain.contract_id == "13822ee42157a9b6534b61e20006f84f4736edacc102f7aa4caf1084cb2a804a"
    changed = plain.override("order.ties", "highest_index")
    assert changed.contract_id != plain.contract_id
    assert from_json(plain.to_json()) == plain and from_json(changed.to_json()) == changed
