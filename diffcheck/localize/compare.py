"""Compare one boundary of two traces, streaming: patterns where both sides store them, row digests everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diffcheck.base.bits import BoolArray, Difference, UIntArray, compare, ulp_distance
from diffcheck.base.boundaries import Boundary
from diffcheck.base.errors import TraceError
from diffcheck.base.recorded import ONLY_LOGPROBS, RECORDED
from diffcheck.trace.reader import Trace

#: Classes of a histogram: float32 has fewer than 2^33 steps.
_CLASSES = 34


@dataclass(frozen=True)
class Compared:
    """Outcome for one boundary seen on both sides."""

    #: None where only digests could be compared.
    difference: Difference | None
    #: [rows] of the whole boundary: which differ.
    rows: BoolArray
    dtypes: tuple[str, str]
    elements: int


@dataclass(frozen=True)
class Histogram:
    """Elements of one boundary by their distance in ulp."""

    #: [classes]: class 0 holds the elements of equal value, class k those with 2^(k-1) <= ulp < 2^k.
    counts: npt.NDArray[np.int64]
    #: Elements that are NaN on one side only.
    nan: int

    @property
    def used(self) -> npt.NDArray[np.int64]:
        """``counts`` up to the last class that holds an element."""
        return np.trim_zeros(self.counts, "b")


def why_unobserved(node: Boundary, left: Trace, right: Trace) -> str:
    """Why a boundary cannot be compared, or an empty string when it can."""
    for side, trace in (("rollout", left), ("train", right)):
        if node.name not in trace:
            engine = trace.header.engine
            why = trace.header.unobserved.get(node.name, ONLY_LOGPROBS if engine == RECORDED else "not captured")
            return f"{side} ({engine}): {why}"
    a, b = left.entry(node.name), right.entry(node.name)
    if a.dtype != b.dtype and "digest" in (a.level, b.level):
        return f"only digests, of different dtypes ({a.dtype}, {b.dtype})"
    return ""


def compare_boundary(node: Boundary, left: Trace, right: Trace, rows: int) -> Compared:
    """Compare all ``rows`` of one boundary.

    Raises:
        TraceError: a shape that does not fit the samples, or damage found while reading.
    """
    a, b = left.entry(node.name), right.entry(node.name)
    for trace, entry in ((left, a), (right, b)):
        if entry.shape != (rows, node.width):
            raise TraceError(
                f"{trace.folder}: boundary {node.name}: shape {entry.shape}, expected {(rows, node.width)}",
                "the trace does not belong to its own samples: capture it again",
            )
    # Digests cover every row at every level; they decide alone where patterns are missing.
    differs = np.zeros(rows, np.bool_)
    if a.dtype == b.dtype:
        differs |= (left.digests(node.name) != right.digests(node.name)).any(axis=1)
    difference = None
    if "digest" not in (a.level, b.level):
        difference, by_value = _stream(node.name, left, right, rows)
        differs |= by_value
    return Compared(difference, differs, (a.dtype, b.dtype), difference.elements if difference else rows * node.width)


def _stream(name: str, left: Trace, right: Trace, rows: int) -> tuple[Difference, BoolArray]:
    """Compare patterns block by block over the rows stored on both sides."""
    differs = np.zeros(rows, np.bool_)
    a, b = left.entry(name), right.entry(name)
    elements = differing = max_ulp = 0
    max_abs, first = 0.0, -1
    for index, x, y in paired_blocks(name, left, right):
        part = compare(x, a.dtype, y, b.dtype)
        elements += part.elements
        if part.equal:
            continue
        if first < 0:
            first = int(index[part.first // x.shape[1]]) * x.shape[1] + part.first % x.shape[1]
        differing += part.differing
        max_abs, max_ulp = max(max_abs, part.max_abs), max(max_ulp, part.max_ulp)
        differs[index[part.rows]] = True
    return Difference(elements, differing, max_abs, max_ulp, first, differs), differs


def paired_blocks(name: str, left: Trace, right: Trace) -> Iterator[tuple[npt.NDArray[np.int64], UIntArray, UIntArray]]:
    """Blocks of patterns for the same rows of both traces."""
    a, b = left.stored_rows(name), right.stored_rows(name)
    both_full = a is None and b is None
    if both_full or (a is not None and b is not None and np.array_equal(a, b)):
        step = min(left.block_rows(name), right.block_rows(name))
        for (index, x), (_, y) in zip(left.blocks(name, step), right.blocks(name, step), strict=True):
            yield index, x, y
        return
    # At least one side is sampled, hence small: compare the rows that both hold.
    every = np.arange(left.entry(name).shape[0])
    rows_a, rows_b = every if a is None else a, every if b is None else b
    common, at_a, at_b = np.intersect1d(rows_a, rows_b, return_indices=True)
    yield common, left.values(name)[at_a], right.values(name)[at_b]


def histogram(boundary: str, left: Trace, right: Trace) -> Histogram | None:
    """Distances of the elements that both traces hold; None where one of them holds digests only."""
    a, b = left.entry(boundary), right.entry(boundary)
    if "digest" in (a.level, b.level):
        return None
    counts, nan = np.zeros(_CLASSES, np.int64), 0
    for _, x, y in paired_blocks(boundary, left, right):
        gap = ulp_distance(x, a.dtype, y, b.dtype)
        nan += int(np.count_nonzero(gap < 0))
        # The exponent of a positive integer is its bit length.
        _, length = np.frexp(gap[gap >= 0].astype(np.float64))
        counts += np.bincount(length, minlength=_CLASSES)
    return Histogram(counts, nan)
