"""Logprobs that are off by one token are told from logprobs that are off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diffcheck.localize import localize
from tests.diffcheck.synthetic import SAMPLES, Values, flip, pair

COUNTS = [len(s.response_token_ids) for s in SAMPLES]


def rolled(shift: int) -> object:
    """A change that rolls each sample's logprobs."""

    def change(patterns: Values) -> None:
        bits, dtype = patterns["logprobs"]
        parts = np.split(bits, np.cumsum(COUNTS)[:-1])
        patterns["logprobs"] = (np.concatenate([np.roll(part, shift, axis=0) for part in parts]), dtype)

    return change


@pytest.mark.parametrize(("shift", "word"), [(1, "previous"), (-1, "next")])
def test_a_shift_by_one_is_no_divergence(shift: int, word: str, tmp_path: Path) -> None:
    verdict = localize(*pair(tmp_path, rolled(shift)))  # type: ignore[arg-type]
    assert verdict.verdict == "not_comparable" and verdict.first_divergence is None
    assert [m.field for m in verdict.not_comparable] == ["alignment"]
    assert word in verdict.summary and verdict.logprobs is not None and verdict.logprobs.mismatch_count == sum(COUNTS)


def test_other_differences_are_divergences(tmp_path: Path) -> None:
    """One wrong bit beside the shift, a shift by two, or one that an earlier boundary explains."""

    def changed_too(patterns: Values) -> None:
        rolled(1)(patterns)  # type: ignore[operator]
        flip("logprobs", COUNTS[0] + 1)(patterns)

    def earlier_too(patterns: Values) -> None:
        rolled(1)(patterns)  # type: ignore[operator]
        flip("logits", 0)(patterns)

    for number, (change, first) in enumerate(
        ((changed_too, "logprobs"), (rolled(2), "logprobs"), (earlier_too, "logits"))
    ):
        verdict = localize(*pair(tmp_path / str(number), change))  # type: ignore[arg-type]
        assert verdict.verdict == "diverged" and verdict.first_divergence is not None
        assert verdict.first_divergence.boundary == first
