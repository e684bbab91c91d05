"""Log-probability: the three formulas, and float64."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import LogprobContract, LogsumexpContract, logprob, logsumexp
from reference.primitives import exp, log
from tests.reference.exact import add, div, one, random

LOGITS = random(1, 6, 300, fmt="float32", scale=4.0)
TARGETS = np.array([0, 5, 299, 7, 7, 100])
SUMS = LogsumexpContract()
LSE = logsumexp(LOGITS, SUMS)


@pytest.mark.parametrize("formula", ["x - lse", "(x - max) - log(sum)", "log(softmax(x))"])
def test_logprob_equals_scalar_specification(formula: str) -> None:
    got = logprob(LOGITS, TARGETS, LSE, LogprobContract().override("order.formula", formula))
    for t, target in enumerate(TARGETS):
        x, largest, total = float(LOGITS[t, target]), float(LSE.maximum[t]), float(LSE.total[t])
        expected = {
            "x - lse": add(x, -float(LSE.value[t])),
            "(x - max) - log(sum)": add(add(x, -largest), -one(log, total)),
            "log(softmax(x))": one(log, div(one(exp, add(x, -largest)), total)),
        }[formula]
        assert got[t] == np.float32(expected)


def test_probabilities_sum_to_one() -> None:
    every = [logprob(LOGITS, np.full(6, v), LSE, LogprobContract()) for v in range(300)]
    assert np.abs(np.exp(np.array(every, np.float64)).sum(axis=0) - 1).max() < 1e-5


def test_masked_columns() -> None:
    masked = np.where(np.arange(300) >= 200, np.float32(-np.inf), LOGITS)
    lse = logsumexp(masked, SUMS)
    assert logprob(masked, np.full(6, 250), lse, LogprobContract())[0] == -np.inf


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"targets\[1\] = 300 is outside the vocabulary \(0 to 299\)"):
        logprob(LOGITS, np.array([0, 300, 0, 0, 0, 0]), LSE, LogprobContract())
    with pytest.raises(ValueError, match="targets: expected 6, one per row of logits, got 2"):
        logprob(LOGITS, np.array([0, 1]), LSE, LogprobContract())
    with pytest.raises(ValueError, match=r"lse.value: axis 0 \(tokens\) must be 3"):
        logprob(LOGITS[:3], TARGETS[:3], LSE, LogprobContract())
    with pytest.raises(ValueError, match=r"primitives.exp must stay 'rlk' where order.formula is x - lse"):
        LogprobContract().override("primitives.exp", "correctly-rounded")
