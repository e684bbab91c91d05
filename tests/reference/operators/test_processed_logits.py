"""Temperature, top-k and top-p."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reference.operators import ProcessedLogitsContract, processed_logits
from tests.reference.exact import assert_same_bits, div, mul, random

CONTRACT = ProcessedLogitsContract()
LOGITS = random(1, 4, 50, fmt="float32", scale=3.0)


def kept(x: list[float], **settings: object) -> list[int]:
    contract = settings.pop("contract", CONTRACT)
    y = processed_logits(np.array([x], np.float32), contract, **settings)  # type: ignore[arg-type]
    return np.flatnonzero(np.isfinite(y[0])).tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_temperature_equals_scalar_specification(temperature: float) -> None:
    t = float(np.float32(temperature))
    for how, scalar in (("divide", lambda v: div(v, t)), ("reciprocal", lambda v: mul(v, div(1.0, t)))):
        got = processed_logits(LOGITS, CONTRACT.override("primitives.temperature", how), temperature)
        assert_same_bits(got, np.array([[scalar(v) for v in row] for row in LOGITS.tolist()], np.float32))


def test_temperature_one_changes_nothing() -> None:
    assert_same_bits(processed_logits(LOGITS, CONTRACT), LOGITS)


def test_top_k_and_ties() -> None:
    assert kept([1, 5, 3, 4], top_k=2) == [1, 3]
    assert kept([1, 5, 5, 5], top_k=2) == [1, 2, 3]
    lowest = CONTRACT.override("domain.top_k_ties", "lowest_index")
    assert kept([1, 5, 5, 5], top_k=2, contract=lowest) == [1, 2]
    assert kept([1, 5, 3, 4], top_k=9) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_top_p_keeps_the_smallest_set_with_enough_mass(order: str, p: float) -> None:
    contract = CONTRACT.override("order.top_p", order)
    for row in LOGITS:
        probabilities = np.exp(row.astype(np.float64) - row.max())
        probabilities /= probabilities.sum()
        mine = kept(row.tolist(), top_p=p, contract=contract)
        assert probabilities[mine].sum() >= p - 1e-6
        assert probabilities[mine].sum() - probabilities[mine].min() < p + 1e-6


def test_the_most_probable_token_always_stays() -> None:
    assert kept([0, 10, 0], top_p=1e-6) == [1]


@pytest.mark.parametrize("ties", ["keep", "lowest_index"])
@pytest.mark.parametrize("top_p", ["ascending", "descending"])
@pytest.mark.parametrize("filters", ["top_k_top_p", "top_p_top_k"])
def test_no_mask_hides_a_nan(filters: str, top_p: str, ties: str) -> None:
    """Each alone and both, the NaN in every place; the other rows are masked as ever."""
    changes = {"order.filters": filters, "order.top_p": top_p, "domain.top_k_ties": ties}
    contract = CONTRACT.replace(changes)
    for settings in ({"top_k": 1}, {"top_p": 0.3}, {"top_k": 2, "top_p": 0.3}):
        masked = processed_logits(LOGITS, contract, 0.5, **settings)  # type: ignore[arg-type]
        for column in range(0, 50, 7):
            spoilt = LOGITS.copy()
            spoilt[1, column] = np.nan
            got = processed_logits(spoilt, contract, 0.5, **settings)  # type: ignore[arg-type]
            assert_same_bits(got[1], spoilt[1] / np.float32(0.5))
            assert_same_bits(np.delete(got, 1, 0), np.delete(masked, 1, 0))


def test_a_nan_that_the_scaling_makes_counts_too() -> None:
    """fp32(1 / temperature) overflows: infinity times zero."""
    contract = CONTRACT.override("primitives.temperature", "reciprocal")
    got = processed_logits(np.array([[1, 0, 2]], np.float32), contract, 1e-39, top_k=1)
    assert np.isnan(got).tolist() == [[False, True, False]] and np.isposinf(got[0, [0, 2]]).all()


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 0.5}])
def test_an_empty_vocabulary_cannot_be_masked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="the vocabulary is empty"):
        processed_logits(np.zeros((2, 0), np.float32), CONTRACT, **settings)  # type: ignore[arg-type]


def test_order_of_filters() -> None:
    assert kept([3, 2, 1, 0], top_k=2, top_p=0.7) == [0]
    reverse = CONTRACT.override("order.filters", "top_p_top_k")
    assert kept([3, 2, 1, 0], top_k=2, top_p=0.7, contract=reverse) == [0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature: must be finite and above 0"),
        ({"temperature": math.nan}, "temperature: must be finite"),
        ({"top_k": 0}, "top_k: must be an integer of at least 1"),
        ({"top_p": 0.0}, "top_p: must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p: must be above 0 and at most 1"),
    ],
)
def test_bad_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processed_logits(LOGITS, CONTRACT, **settings)  # type: ignore[arg-type]
