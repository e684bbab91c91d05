"""The intervention that puts a trace's values into a live forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from diffcheck.base.bits import UIntArray, is_nan, to_float32, uint_type
from diffcheck.base.boundaries import graph
from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample
from diffcheck.capture.interventions import register
from diffcheck.rows import Index, IntArray, Rows, expected_rows
from diffcheck.trace.reader import Trace
from diffcheck.trace.schema import HEADER
from reference.models.config import ModelConfig


@register("replace")
@dataclass(frozen=True)
class Replace:
    """Values of a trace of level full in place of the live ones, row by (sample, position) row.

    Rows and boundaries that the trace does not hold stay as they are. The recorder undoes and redoes sharding, fused
    modules and packing, so the trace may come from any engine, phase and tensor parallelism.
    """

    #: Name or pattern of the boundaries that are replaced.
    boundary: str
    trace: Path
    reads: ClassVar[tuple[str, ...]] = ()
    aligns: ClassVar[bool] = True

    def apply(self, name: str, sample: IntArray, position: IntArray, bits: UIntArray, dtype: str) -> UIntArray | None:
        """Raises:
        InputError: a value that the live dtype cannot hold.
        TraceError: the trace is damaged.
        """
        source = _source(self.trace, written_at(self.trace))
        rows = source.rows(name, sample, position)
        if rows is None or not (rows >= 0).any():
            return None
        hit = rows >= 0
        theirs, their_dtype = source.values(name)
        changed = bits.copy()
        changed[hit] = converted(name, theirs[rows[hit]], their_dtype, dtype)
        return changed

    def to_json(self) -> dict[str, Any]:
        return {"kind": "replace", "boundary": self.boundary, "trace": str(self.trace)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Replace:
        return cls(data["boundary"], Path(data["trace"]))


class _Source:
    """A trace's rows by (sample, position); each boundary is read once."""

    def __init__(self, folder: Path) -> None:
        self._trace = Trace(folder)
        header = self._trace.header
        self._sets = {b.name: b.rows for b in graph(ModelConfig(**header.object.model), header.tensor_parallel)}
        expected = expected_rows([Sample.from_json(s) for s in header.samples])
        self._at = {name: Index(rows) for name, rows in expected.items()}
        self._values: dict[str, tuple[UIntArray, str]] = {}

    def rows(self, name: str, sample: IntArray, position: IntArray) -> IntArray | None:
        """Row numbers in the trace, -1 where it has none; None where it lacks the boundary."""
        if name not in self._trace:
            return None
        return self._at[self._sets[name]].find(Rows(sample, position))

    def values(self, name: str) -> tuple[UIntArray, str]:
        if name not in self._values:
            self._values[name] = (self._trace.values(name), self._trace.entry(name).dtype)
        return self._values[name]


def written_at(trace: Path) -> int:
    """When a trace was written, in nanoseconds: with its path, what a memory of it goes by. 0 where there is none."""
    header = trace / HEADER
    return header.stat().st_mtime_ns if header.exists() else 0


@lru_cache(maxsize=2)
def _source(folder: Path, _written: int) -> _Source:
    """One for all boundaries that a plan replaces; a trace that was written anew is read anew."""
    return _Source(folder)


def converted(name: str, bits: UIntArray, source: str, target: str) -> UIntArray:
    """The same values as patterns of dtype ``target``.

    Raises:
        InputError: ``target`` cannot hold one of them.
    """
    if source == target:
        return bits
    values = to_float32(bits, source)
    if target == "float32":
        return values.view(np.uint32)
    if target == "float16":
        with np.errstate(over="ignore"):
            narrow: UIntArray = values.astype(np.float16).view(np.uint16)
    else:
        narrow = (values.view(np.uint32) >> 16).astype(uint_type(target))
    back = to_float32(narrow, target)
    same = (back.view(np.uint32) == values.view(np.uint32)) | (is_nan(narrow, target) & np.isnan(values))
    if not same.all():
        raise InputError(
            f"{name}: {source} values do not fit {target}, in which the engine holds this boundary",
            "align a boundary after it",
        )
    return narrow
