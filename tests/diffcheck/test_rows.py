"""Rows: found where they lie, the last arrival wins, and what a plan asks for."""

from __future__ import annotations

import numpy as np

from diffcheck.base.samples import Sample
from diffcheck.rows import Index, Rows, expected_rows, planned

SAMPLES = (Sample((1, 2, 3), (4, 5)), Sample((6,), (7,)))


def rows(*places: tuple[int, int]) -> Rows:
    sample, position = zip(*places, strict=True)
    return Rows(np.array(sample, np.int64), np.array(position, np.int64))


def test_every_row_is_found_where_a_dictionary_finds_it() -> None:
    rng = np.random.default_rng(3)
    arrived = Rows(rng.integers(-1, 6, 500), rng.integers(0, 40, 500))
    asked = Rows(np.repeat(np.arange(7), 45), np.tile(np.arange(45), 7))
    at = {place: i for i, place in enumerate(arrived.places())}
    assert Index(arrived).find(asked).tolist() == [at.get(place, -1) for place in asked.places()]


def test_of_a_row_that_came_twice_the_last_counts() -> None:
    assert Index(rows((0, 1), (0, 2), (0, 1))).find(rows((0, 1), (1, 1))).tolist() == [2, -1]


def test_nothing_arrived() -> None:
    assert Index(Rows.join(())).find(rows((0, 0))).tolist() == [-1]


def test_expected_rows_are_those_that_are_planned() -> None:
    every = Rows(np.repeat(np.arange(-1, 2), 6), np.tile(np.arange(6), 3))
    for row_set, expected in expected_rows(SAMPLES).items():
        mask = planned(every, SAMPLES, row_set)  # type: ignore[arg-type]
        assert every.take(mask).places() == expected.places()
    open_end = planned(every, SAMPLES, "response", finished=False)
    assert open_end.sum() > planned(every, SAMPLES, "response").sum()
