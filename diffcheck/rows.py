"""Rows: which token of which sample each row of a tensor is; which rows a comparison expects; where rows lie.

A row is named by (sample, position). Engines compute rows in any order, in pieces, and with padding among them; every
comparison takes them ordered by (sample, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diffcheck.base.bits import BoolArray
from diffcheck.base.boundaries import RowSet
from diffcheck.base.samples import Sample

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Which (sample, position) each row of an engine's tensor belongs to: two arrays [rows]. Rows with sample -1 are
    padding.

    ``position`` is the token's index in its sequence. What the engine fed to its rotary embedding belongs in the object
    record.
    """

    sample: IntArray
    position: IntArray

    @classmethod
    def of(cls, sample: int, positions: range) -> Rows:
        return cls(np.full(len(positions), sample, np.int64), np.array(positions, np.int64))

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        sample, position = zip(*((p.sample, p.position) for p in (cls.of(0, range(0)), *parts)), strict=True)
        return cls(np.concatenate(sample), np.concatenate(position))

    def take(self, index: IntArray | slice | BoolArray) -> Rows:
        return Rows(self.sample[index], self.position[index])

    def __len__(self) -> int:
        return int(self.sample.size)

    @property
    def keys(self) -> IntArray:
        """[rows], one number a row, in the order of (sample, position); positions are below 2^32."""
        keys: IntArray = (self.sample << 32) | self.position
        return keys

    def places(self) -> list[tuple[int, int]]:
        """(sample, position) of each row."""
        return list(zip(self.sample.tolist(), self.position.tolist(), strict=True))


class Index:
    """Where rows lie among ``rows``: sorted once, asked with arrays. Of a row that is there twice, the last counts."""

    def __init__(self, rows: Rows) -> None:
        keys = rows.keys
        # Stable: of equal keys the last arrival stays the last.
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    def find(self, rows: Rows) -> IntArray:
        """Row number of each of ``rows``, -1 where it is not among them: [rows]."""
        if not self._sorted.size:
            return np.full(len(rows), -1, np.int64)
        keys = rows.keys
        at = np.maximum(np.searchsorted(self._sorted, keys, side="right") - 1, 0)
        return np.where(self._sorted[at] == keys, self._order[at], -1)


def expected_rows(samples: Sequence[Sample]) -> dict[str, Rows]:
    """Rows of finished samples: row set -> rows ordered by (sample, position)."""
    every = [Rows.of(i, range(s.forward_length)) for i, s in enumerate(samples)]
    response = [Rows.of(i, s.response_positions) for i, s in enumerate(samples)]
    return {"all": Rows.join(every), "response": Rows.join(response)}


def planned(rows: Rows, samples: Sequence[Sample], row_set: RowSet, *, finished: bool = True) -> BoolArray:
    """Which ``rows`` a comparison asks for: real samples, positions that something follows, and of the row set
    "response" those that predict a response token: [rows].

    Args:
        finished: whether the samples have their responses; without them nobody knows yet which position is the last.
    """
    of = np.maximum(rows.sample, 0)
    keep: BoolArray = rows.sample >= 0
    if row_set == "response":
        keep &= rows.position >= np.array([len(s.prompt_token_ids) - 1 for s in samples], np.int64)[of]
    if finished:
        keep &= rows.position < np.array([s.forward_length for s in samples], np.int64)[of]
    return keep
