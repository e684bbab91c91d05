"""Entropy: the three formulas against float64, and columns that are masked."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import EntropyContract, entropy, logsumexp
from tests.reference.exact import assert_same_bits
from tests.reference.operators.test_logprob import LOGITS, LSE, SUMS


@pytest.mark.parametrize("formula", ["log(sum) - mean(x - max)", "lse - mean(x)", "-sum(p log p)"])
def test_entropy_is_close_to_float64(formula: str) -> None:
    got = entropy(LOGITS, LSE, EntropyContract().override("order.formula", formula), SUMS)
    p = np.exp(LOGITS.astype(np.float64) - LOGITS.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    assert np.abs(got + (p * np.log(p)).sum(axis=1)).max() < 1e-5


def test_masked_columns() -> None:
    masked = np.where(np.arange(300) >= 200, np.float32(-np.inf), LOGITS)
    lse = logsumexp(masked, SUMS)
    for formula in ("log(sum) - mean(x - max)", "lse - mean(x)", "-sum(p log p)"):
        contract = EntropyContract().override("order.formula", formula)
        assert np.isfinite(entropy(masked, lse, contract, SUMS)).all()
    certain = np.array([[0.0, -np.inf]], np.float32)
    assert_same_bits(entropy(certain, logsumexp(certain, SUMS), EntropyContract(), SUMS), np.zeros(1, np.float32))
