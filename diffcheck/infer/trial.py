"""Trying one contract: run the reference on some rows of a site and count the elements that have the side's bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diffcheck.base.bits import BoolArray, UIntArray, compare, to_float32
from diffcheck.infer.arguments import COLUMN_OPERATORS, call
from diffcheck.infer.sites import Site, spread
from diffcheck.rows import IntArray
from reference.checks import Float32Array
from reference.contract import Contract

#: Elements computed at a time.
_BLOCK_ELEMENTS = 1 << 22
#: Multiply-adds that one try of a matrix product may cost; beyond, some of its columns stand for all.
_PRODUCT_COST = 1 << 24
_FEW_COLUMNS = 64


@dataclass(frozen=True)
class Level:
    """A part of a site: rows, by index into its arrays, and columns (None: all)."""

    rows: IntArray
    columns: IntArray | None = None


@dataclass(frozen=True)
class Score:
    """How a contract did on a level."""

    elements: int
    matching: int
    max_ulp: int = 0
    #: Rows of the level in which an element differs.
    rows_failing: int = 0

    @property
    def fits(self) -> bool:
        return self.matching == self.elements > 0

    @property
    def share(self) -> float:
        return self.matching / max(1, self.elements)


class Trial:
    """Scores contracts at one site.

    Args:
        rows: how many rows are sampled before all are looked at.
        prefer: indices of rows that tell most (where the two sides differ): half of the sample is taken from them.
    """

    def __init__(self, site: Site, rows: int, prefer: IntArray | None = None) -> None:
        self.site = site
        every = np.arange(len(site.arguments))
        sample = every[spread(every.size, rows)]
        if prefer is not None and prefer.size:
            some = every[spread(every.size, max(1, rows // 2))]
            rest = np.setdiff1d(prefer, some)
            sample = np.union1d(some, rest[spread(rest.size, rows - some.size)] if rest.size else rest)
        # From the end: late rows have long histories and large positions, which tell contracts apart.
        late_first = sample[::-1]
        sizes = [n for n in (1, 4, 16) if n < sample.size]
        few = self._columns(_FEW_COLUMNS)
        self.levels = [Level(late_first[spread(sample.size, n)], few) for n in sizes]
        self.levels.append(Level(late_first, few))
        self.levels.append(Level(every, self._columns(self._affordable_columns(every.size))))

    @property
    def width(self) -> int:
        """Outputs of a row that the last level looks at."""
        columns = self.levels[-1].columns
        return int(self.site.target.shape[1] if columns is None else columns.size)

    def at(self, contract: Contract, depth: int) -> Score | None:
        """`score` at level ``depth`` of `levels`."""
        return self.score(contract, self.levels[depth])

    def score(self, contract: Contract, level: Level) -> Score | None:
        """Bits of ``contract`` against the side's; None where the contract is impossible for these shapes."""
        elements = matching = failing = ulp = 0
        for rows in self._blocks(level):
            try:
                with np.errstate(all="ignore"):
                    result = call(self.site.arguments.take(rows, level.columns), contract)
            except ValueError:
                return None
            target = self.site.target[rows] if level.columns is None else self.site.target[np.ix_(rows, level.columns)]
            bad = ~same_bits(result, to_float32(target, self.site.dtype))
            elements += bad.size
            wrong = int(np.count_nonzero(bad))
            matching += bad.size - wrong
            if wrong:
                failing += int(np.count_nonzero(bad.any(axis=1)))
                bits, dtype = _patterns(result, self.site.dtype)
                ulp = max(ulp, compare(bits, dtype, target, self.site.dtype).max_ulp)
        return Score(elements, matching, ulp, failing)

    def _blocks(self, level: Level) -> Iterator[IntArray]:
        step = max(1, _BLOCK_ELEMENTS // max(1, self.site.target.shape[1]))
        for start in range(0, level.rows.size, step):
            # Arguments that the reference reads in row order stay in it.
            yield np.sort(level.rows[start : start + step])

    def _columns(self, count: int) -> IntArray | None:
        width = self.site.target.shape[1]
        free = self.site.arguments.operator in COLUMN_OPERATORS and "ranks" not in self.site.arguments.facts
        return spread(width, count) if free and count < width else None

    def _affordable_columns(self, rows: int) -> int:
        inputs = self.site.arguments.rows
        return max(_FEW_COLUMNS, _PRODUCT_COST // (rows * inputs["x"].shape[1])) if "x" in inputs else 0


def same_bits(a: Float32Array, b: Float32Array) -> BoolArray:
    """Element by element: equal patterns, or both NaN."""
    return np.asarray((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b)))


def _patterns(result: Float32Array, dtype: str) -> tuple[UIntArray, str]:
    """``result`` in ``dtype`` where it has only such values, so that ulps count steps of that format."""
    bits = np.ascontiguousarray(result).view(np.uint32)
    if dtype == "bfloat16" and not (bits & 0xFFFF).any():
        return (bits >> 16).astype(np.uint16), "bfloat16"
    return bits, "float32"
