from __future__ import annotations

import math

import pytest

from diffcheck.base.samples import Sample
from diffcheck.capture.graph_run import differences, note_of


def samples(*logprobs: tuple[float, ...]) -> list[Sample]:
    return [Sample((1, 2), tuple(range(3, 3 + len(row))), rollout_logprobs=row) for row in logprobs]


def test_the_graphs_logprobs_are_compared_by_their_bits() -> None:
    observed = samples((-1.0, -0.0), (math.nan, -2.5, -3.0))
    same = differences(observed, observed)
    assert same == {"compared": 5, "mismatch_count": 0, "max_abs_diff": 0.0, "first": None}
    assert "the same 5 logprobs" in note_of("rollout", {**same, "modes": {"FULL": 3, "PIECEWISE": 2}})
    other = differences(observed, samples((-1.0, 0.0), (math.nan, -2.5, -3.25)))
    assert other == {"compared": 5, "mismatch_count": 2, "max_abs_diff": 0.25, "first": {"sample": 0, "token": 1}}
    assert "other bits for 2 of 5" in note_of("rollout", {**other, "modes": {"FULL": 3}})
    with pytest.raises(ValueError, match="5 observed logprobs, 3 of the graphs"):
        differences(observed, samples((-1.0,), (-1.0, -2.0)))
