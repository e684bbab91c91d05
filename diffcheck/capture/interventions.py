"""Changes made to one side on purpose, at a boundary of the live forward: what-if questions and fault injection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from diffcheck.base.bits import UIntArray

IntArray = npt.NDArray[np.int64]
#: What makes a name a pattern.
_WILD = frozenset("*?[")


class Intervention(Protocol):
    """Anything that may replace a boundary's values while the engine runs."""

    @property
    def boundary(self) -> str:
        """Name or pattern (``layers.*.mlp.act``) of the boundaries it may change."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of boundaries that it must see first; it changes nothing there."""

    @property
    def aligns(self) -> bool:
        """Whether it puts another side's operator in place: what the engine computed is what was there before."""

    def apply(self, name: str, sample: IntArray, position: IntArray, bits: UIntArray, dtype: str) -> UIntArray | None:
        """New patterns [rows, width] of the same type, or None to leave these rows alone.

        Args:
            sample: [rows] sample number of each row. position: [rows] its position.
        """

    def to_json(self) -> dict[str, Any]:
        """Data form, for a capture in another process."""


@dataclass(frozen=True)
class BitFlip:
    """Invert one bit of one element: the smallest fault there is. Bit 0 is the last bit of the mantissa."""

    boundary: str
    sample: int
    position: int
    index: int
    bit: int = 0
    reads: ClassVar[tuple[str, ...]] = ()
    aligns: ClassVar[bool] = False

    def apply(self, name: str, sample: IntArray, position: IntArray, bits: UIntArray, dtype: str) -> UIntArray | None:
        hit = (sample == self.sample) & (position == self.position)
        if not hit.any():
            return None
        changed = bits.copy()
        changed[hit, self.index] ^= bits.dtype.type(1 << self.bit)
        return changed

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bit_flip", **asdict(self)}


@dataclass(frozen=True)
class Function:
    """A Python function ``(sample, position, bits, dtype) -> bits or None``; only for captures in this process."""

    boundary: str
    function: Callable[[IntArray, IntArray, UIntArray, str], UIntArray | None]
    reads: ClassVar[tuple[str, ...]] = ()
    aligns: ClassVar[bool] = False

    def apply(self, name: str, sample: IntArray, position: IntArray, bits: UIntArray, dtype: str) -> UIntArray | None:
        return self.function(sample, position, bits, dtype)

    def to_json(self) -> dict[str, Any]:
        raise TypeError(f"intervention at {self.boundary}: a Python function cannot be sent to another process")


def intervention_from_json(data: dict[str, Any]) -> Intervention:
    """Inverse of ``to_json``.

    Raises:
        ValueError: unknown kind.
    """
    kind = data.get("kind")
    rest = {k: v for k, v in data.items() if k != "kind"}
    if kind == "bit_flip":
        return BitFlip(**rest)
    # Imported on demand: these two read traces, whose reader stands above this module.
    if kind == "replace":
        from diffcheck.capture.replace import Replace

        return Replace.from_json(rest)
    if kind == "recompute":
        from diffcheck.ablate.recompute import Recompute

        return Recompute.from_json(rest)
    raise ValueError(f"intervention kind {kind!r} is unknown")


class Interventions:
    """The interventions of one plan, found by boundary: hooks ask at every step, and an ablation has one a boundary."""

    def __init__(self, interventions: Sequence[Intervention]) -> None:
        self._named: dict[str, list[tuple[int, Intervention]]] = {}
        self._patterns: list[tuple[int, Intervention]] = []
        for order, intervention in enumerate(interventions):
            names = {*intervention.reads}
            if _WILD.isdisjoint(intervention.boundary):
                names.add(intervention.boundary)
            else:
                self._patterns.append((order, intervention))
            for name in names:
                self._named.setdefault(name, []).append((order, intervention))
        self._found: dict[str, list[Intervention]] = {}

    def at(self, boundary: str) -> list[Intervention]:
        """Those that may change ``boundary`` or must see it: changes of the side's own first, then the aligning ones,
        each in the plan's order.
        """
        if boundary not in self._found:
            fitting = [entry for entry in self._patterns if fnmatchcase(boundary, entry[1].boundary)]
            chosen = dict((*fitting, *self._named.get(boundary, ())))
            order = sorted(chosen, key=lambda i: (chosen[i].aligns, i))
            self._found[boundary] = [chosen[i] for i in order]
        return self._found[boundary]
