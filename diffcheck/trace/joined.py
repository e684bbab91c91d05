"""Two traces of the same samples in another order: found by what the samples are, and read as if in one order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcheck.base.bits import UIntArray, digest_of_rows
from diffcheck.base.samples import Sample
from diffcheck.trace.reader import Trace
from diffcheck.trace.schema import BoundaryEntry, Header

IntArray = npt.NDArray[np.int64]


def partners(left: Sequence[Sample], right: Sequence[Sample]) -> list[int | None]:
    """For each left sample the index of the right one that is the same, or None.

    The same is what has the same id; then what has the same tokens; then the same prompt; then the same place among
    those that are left over, so that a difference in one sample stays a difference of that sample. Equal samples are
    paired in their order.
    """
    found: list[int | None] = [None] * len(left)
    free = dict.fromkeys(range(len(right)))
    keys: tuple[Callable[[Sample], Hashable], ...] = (
        lambda s: None if s.id is None else ("id", s.id),
        lambda s: (*s.prompt_token_ids, -1, *s.response_token_ids),
        lambda s: s.prompt_token_ids,
        lambda s: "any",
    )
    for key in keys:
        waiting: dict[Hashable, list[int]] = {}
        for j in free:
            if (name := key(right[j])) is not None:
                waiting.setdefault(name, []).append(j)
        for i, sample in enumerate(left):
            name = key(sample)
            if found[i] is None and name is not None and (group := waiting.get(name)):
                found[i] = group_first = group.pop(0)
                del free[group_first]
    return found


def join(left: Trace, right: Trace) -> Trace:
    """``right`` with its samples in the order of ``left``'s; itself where they are so already, or not as many."""
    ours, theirs = samples_of(left), samples_of(right)
    if len(ours) != len(theirs):
        return right
    order = [j for j in partners(ours, theirs) if j is not None]
    return right if order == list(range(len(ours))) else JoinedTrace(right, order)


def samples_of(trace: Trace) -> list[Sample]:
    """The samples of a trace, responses included."""
    return [Sample.from_json(s, f"{trace.folder}: sample {i}") for i, s in enumerate(trace.header.samples)]


class JoinedTrace(Trace):
    """A trace with its samples in another order, or with some of them only. Nothing is copied: rows are found where
    they lie.

    Args:
        order: for each sample here, its number there.
    """

    def __init__(self, trace: Trace, order: Sequence[int]) -> None:
        super().__init__(trace.folder)
        self._plain = trace
        self.order = list(order)
        samples = samples_of(trace)
        lengths = [s.forward_length for s in samples], [len(s.response_token_ids) for s in samples]
        # A boundary holds a row for every position fed forward, or for every response token.
        self._rows = {sum(n): _rows(n, self.order) for n in lengths}
        self.header = _reordered(self.header, self.order)
        if len(self.order) < len(samples):
            self.header.boundaries = {name: self._part(name) for name in self.header.boundaries}

    def _part(self, boundary: str) -> BoundaryEntry:
        """The entry of a boundary of which some rows are left out."""
        entry = self._plain.entry(boundary)
        digests = self._plain.digests(boundary)[self._order(boundary)]
        return replace(entry, shape=(digests.shape[0], entry.shape[1]), sha256=digest_of_rows(digests))

    def digests(self, boundary: str) -> npt.NDArray[np.uint8]:
        digests = self._plain.digests(boundary)
        return digests[self._order(boundary)]

    def stored_rows(self, boundary: str) -> IntArray | None:
        if self._plain.stored_rows(boundary) is None:
            return None
        return self._stored(boundary)[0]

    def row(self, boundary: str, row: int) -> UIntArray | None:
        logical, place = self._stored(boundary)
        at = np.flatnonzero(logical == row)
        if not at.size:
            return None
        start = int(place[at[0]])
        bits: UIntArray = self._plain.slice(boundary, start, start + 1)
        return bits

    def blocks(self, boundary: str, step: int | None = None) -> Iterator[tuple[IntArray, UIntArray]]:
        entry = self.entry(boundary)
        if entry.level == "digest":
            return
        digests = self.digests(boundary)
        logical, place = self._stored(boundary)
        step = step or self.block_rows(boundary)
        for start in range(0, logical.size, step):
            rows, part = logical[start : start + step], place[start : start + step]
            runs = np.split(part, np.flatnonzero(np.diff(part) != 1) + 1)
            bits = np.concatenate([self._plain.slice(boundary, int(run[0]), int(run[-1]) + 1) for run in runs])
            self.check_rows(boundary, rows, bits, digests)
            yield rows, bits

    def _order(self, boundary: str) -> IntArray:
        rows = self._plain.entry(boundary).shape[0]
        return self._rows.get(rows, np.arange(rows))

    def _stored(self, boundary: str) -> tuple[IntArray, IntArray]:
        """Rows whose patterns are stored, in this order of samples, and where in the file each of them lies."""
        order = self._order(boundary)
        stored = self._plain.stored_rows(boundary)
        if stored is None:
            return np.arange(order.size), order
        at = np.full(self._plain.entry(boundary).shape[0], -1, np.int64)
        at[stored] = np.arange(stored.size)
        place = at[order]
        logical = np.flatnonzero(place >= 0)
        return logical, place[logical]


def _rows(lengths: Sequence[int], order: Sequence[int]) -> IntArray:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    parts = [np.arange(starts[i], starts[i + 1]) for i in order]
    return np.concatenate(parts).astype(np.int64)


def _reordered(header: Header, order: Sequence[int]) -> Header:
    record = header.object
    lists = ("token_ids", "target_ids", "positions", "active")
    moved: dict[str, Any] = {name: [getattr(record, name)[i] for i in order] for name in lists if getattr(record, name)}
    slots = record.kv.slots
    kv = replace(record.kv, slots=[slots[i] for i in order]) if len(slots) == len(header.samples) else record.kv
    return replace(
        header,
        samples=[header.samples[i] for i in order],
        object=replace(record, **moved, kv=kv),
    )
