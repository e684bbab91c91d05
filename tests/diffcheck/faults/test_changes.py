"""The changes as data, and the orders of positions they make."""

from __future__ import annotations

import inspect

import pytest

from diffcheck.faults.changes import Change, find
from diffcheck.faults.changes.positions import zigzag_positions
from diffcheck.faults.engines import chosen

CHANGES = {repr(c): c for _, run in chosen(None, None) for c in (*run.changes, *run.healthy, *run.then)}


def test_zigzag_pairs_the_front_with_the_back() -> None:
    assert zigzag_positions(8) == [0, 1, 6, 7, 2, 3, 4, 5]
    assert zigzag_positions(12, ranks=3) == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    for length in (1, 5, 73):
        assert sorted(zigzag_positions(length)) == list(range(length))


@pytest.mark.parametrize("change", CHANGES.values(), ids=lambda c: c.name)
def test_every_change_exists_and_takes_its_arguments(change: Change) -> None:
    inspect.signature(find(change.name)).bind(None, **change.arguments)
