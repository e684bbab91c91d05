"""Changes made to one side on purpose, at a boundary of the live forward: what-if questions and fault injection."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol, TypeVar

from diffcheck.base.bits import UIntArray
from diffcheck.base.errors import InputError
from diffcheck.rows import IntArray

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


class _Kind(Protocol):
    """A class of interventions that can be rebuilt in another process."""

    def from_json(self, data: dict[str, Any], /) -> Intervention:
        """Inverse of ``to_json``, without the kind."""


_KINDS: dict[str, _Kind] = {}
_Class = TypeVar("_Class", bound=_Kind)


def register(kind: str) -> Callable[[_Class], _Class]:
    """Class decorator: interventions whose ``to_json`` has this ``kind`` are rebuilt by the class's ``from_json``.

    Which kinds there are is not known here: they read traces and infer contracts, whose modules stand above this one.
    """

    def enter(made: _Class) -> _Class:
        _KINDS[kind] = made
        return made

    return enter


def sent(intervention: Intervention) -> dict[str, Any]:
    """``to_json`` with the module that registers its kind, for a process that may not have imported it."""
    return {"module": type(intervention).__module__, **intervention.to_json()}


def received(data: Mapping[str, Any]) -> Intervention:
    """Inverse of `sent`.

    Raises:
        ValueError: unknown kind.
    """
    values = dict(data)
    importlib.import_module(values.pop("module"))
    kind = values.pop("kind")
    if kind not in _KINDS:
        raise ValueError(f"intervention kind {kind!r} is unknown")
    return _KINDS[kind].from_json(values)


@register("bit_flip")
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
        """Raises:
        InputError: an element or bit that the values do not have.
        """
        hit = (sample == self.sample) & (position == self.position)
        if not hit.any():
            return None
        width, size = bits.shape[1], bits.dtype.itemsize * 8
        if self.index >= width or self.bit >= size:
            raise InputError(
                f"flip of element {self.index}, bit {self.bit} at {name}: it has {width} elements of {size} bits",
                f"choose an element below {width} and a bit below {size}",
            )
        changed = bits.copy()
        changed[hit, self.index] ^= bits.dtype.type(1 << self.bit)
        return changed

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bit_flip", **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BitFlip:
        return cls(**data)


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
