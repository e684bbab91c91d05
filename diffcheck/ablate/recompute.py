"""The intervention that puts the reference operator, under a contract, into a live forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from diffcheck.base.bits import UIntArray, to_float32
from diffcheck.base.boundaries import Boundary
from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample
from diffcheck.capture.interventions import register
from diffcheck.capture.replace import converted, written_at
from diffcheck.infer.arguments import Arguments, call
from diffcheck.infer.sites import arguments_of, node_of, operator_inputs
from diffcheck.infer.weights import TracedWeights
from diffcheck.rows import IntArray, Rows, planned
from diffcheck.trace.reader import Trace
from diffcheck.trace.schema import Header
from reference.checks import Float32Array
from reference.contract import Contract, from_json


@dataclass(frozen=True)
class Operator:
    """A contract that stands for an engine's operator."""

    contract: Contract
    #: Of a log-probability whose log-sum-exp is formed inside it: that one's contract.
    logsumexp: Contract | None = None

    def call(self, arguments: Arguments) -> Float32Array:
        """[rows, width], float32."""
        if self.logsumexp is not None:
            arguments = replace(arguments, facts={**arguments.facts, "logsumexp": self.logsumexp})
        with np.errstate(all="ignore"):
            return call(arguments, self.contract)

    def to_json(self) -> dict[str, Any]:
        inner = self.logsumexp
        return {"contract": self.contract.to_json(), "logsumexp": None if inner is None else inner.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Operator:
        inner = data["logsumexp"]
        return cls(from_json(data["contract"]), None if inner is None else from_json(inner))


@register("recompute")
@dataclass(frozen=True)
class Recompute:
    """One boundary computed by the reference as ``operator``, from the inputs that the live forward has there.

    Which inputs they are (a fusing engine's norm reads the unrounded sum), and the facts of the call, are those of the
    side that made ``trace``. Among the interventions of a plan, those at the inputs must come earlier.
    """

    boundary: str
    operator: Operator
    #: Trace of the side whose operator this is, and the folder of its model.
    trace: Path
    model: Path
    aligns: ClassVar[bool] = True
    _live: list[_Live] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return tuple(_inputs(self.trace, written_at(self.trace), self.boundary).values())

    def apply(self, name: str, sample: IntArray, position: IntArray, bits: UIntArray, dtype: str) -> UIntArray | None:
        """Raises:
        InputError: the live forward did not show an input first, a weight is not the traced one, or the live dtype
            cannot hold the contract's result.
        """
        if not self._live:
            self._live.append(_Live(self.trace, self.boundary, self.model))
        live = self._live[0]
        if name != self.boundary:
            live.see(name, sample, position, to_float32(bits, dtype))
            return None
        mine = planned(Rows(sample, position), live.samples, live.node.rows)
        if not mine.any():
            return None
        result = self.operator.call(live.arguments(Rows(sample[mine], position[mine])))
        changed = bits.copy()
        changed[mine] = converted(name, result.view(np.uint32), "float32", dtype)
        return changed

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "recompute",
            "boundary": self.boundary,
            "operator": self.operator.to_json(),
            "trace": str(self.trace),
            "model": str(self.model),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Recompute:
        return cls(data["boundary"], Operator.from_json(data["operator"]), Path(data["trace"]), Path(data["model"]))


@lru_cache(maxsize=1024)
def _inputs(trace: Path, _written: int, boundary: str) -> dict[str, str]:
    """Every forward of an ablation asks again, and the answer is in the values of a trace that does not change."""
    return operator_inputs(Trace(trace), boundary)


class _Live:
    """Rows that the forward has shown so far, as the source of a call (`diffcheck.infer.sites.Source`)."""

    def __init__(self, trace: Path, boundary: str, model: Path) -> None:
        side = Trace(trace)
        self.header: Header = side.header
        self.samples = [Sample.from_json(s) for s in self.header.samples]
        self.place = Rows.of(0, range(0))
        self.node: Boundary = node_of(side, boundary)
        self._inputs = _inputs(trace, written_at(trace), boundary)
        self._weights = TracedWeights(model, self.header.object.weights, self.header.dtype)
        self._rows: dict[str, dict[tuple[int, int], Float32Array]] = {}

    def see(self, name: str, sample: IntArray, position: IntArray, values: Float32Array) -> None:
        kept = self._rows.setdefault(name, {})
        kept.update(zip(Rows(sample, position).places(), values, strict=True))

    def arguments(self, rows: Rows) -> Arguments:
        """What the operator is called with for ``rows``."""
        self.place = rows
        return arguments_of(self, self.node, self._inputs, np.arange(len(rows)), self._weights)

    def values(self, name: str, rows: IntArray) -> Float32Array:
        return self._stack(name, self.place.take(rows).places())

    def history(self, name: str, sample: int) -> Float32Array:
        """Keys that a later call will see are zeros: the mask keeps them out."""
        seen = self._rows.get(name, {})
        width = next(iter(seen.values())).shape[0]
        out = np.zeros((self.samples[sample].forward_length, width), np.float32)
        for position in range(len(out)):
            if (sample, position) in seen:
                out[position] = seen[sample, position]
        return out

    def _stack(self, name: str, keys: list[tuple[int, int]]) -> Float32Array:
        kept = self._rows.get(name, {})
        missing = [key for key in keys if key not in kept]
        if missing:
            raise InputError(
                f"{self.node.name} cannot be recomputed: its input {name} was not seen first at sample "
                f"{missing[0][0]}, position {missing[0][1]}",
                "the engine computes them in another order: align values instead",
            )
        return np.stack([kept[key] for key in keys])
