"""The two sides of an ablation: their traces, their live engines, and the two kinds of run that everything is made of.

*Lockstep* runs an engine with another forward's values put in at every boundary: each operator gets that forward's
inputs in bits, and what it gives for them is kept before it is replaced. One run shows every operator that differs.
A *spliced* run puts in values at some boundaries only and lets the rest follow.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from diffcheck.base.bits import compare, to_float32
from diffcheck.base.boundaries import Boundary
from diffcheck.base.errors import InputError
from diffcheck.base.statistics import LogprobStats
from diffcheck.capture.adapter import CaptureResult
from diffcheck.capture.interventions import Intervention
from diffcheck.capture.plan import CapturePlan
from diffcheck.capture.replace import Replace, converted
from diffcheck.infer.repeat import unrepeated
from diffcheck.localize.compare import why_unobserved
from diffcheck.trace.reader import Trace


class VoidError(Exception):
    """A substitution did not take place in the engine; the message says where. Nothing follows from that run."""


class Captures(Protocol):
    """A live engine: an `EngineSession`, or an adapter in this process."""

    def capture(self, plan: CapturePlan) -> CaptureResult: ...


@dataclass(frozen=True)
class Run:
    """What one forward went on with and, in lockstep, what its operators gave before they were replaced."""

    trace: Trace
    computed: Trace | None = None

    @property
    def given(self) -> Trace:
        """What the operators gave."""
        assert self.computed is not None
        return self.computed

    def discard(self) -> None:
        """Delete the traces."""
        for trace in (self.trace, self.computed):
            if trace is not None:
                shutil.rmtree(trace.folder, ignore_errors=True)


@dataclass
class Side:
    """One side of the comparison."""

    #: "rollout" or "train".
    role: str
    #: Its trace of the run that is being explained.
    trace: Trace
    #: Where the traces of further runs go.
    scratch: Path
    #: None where the side is a trace that was recorded elsewhere.
    engine: Captures | None = None
    #: The plan of the traced run, responses included.
    plan: CapturePlan | None = None
    runs: int = 0
    #: What it is called where its engine's name does not tell the sides apart.
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.trace.header.engine

    @property
    def live(self) -> bool:
        return self.engine is not None

    def run(self, interventions: Sequence[Intervention] = (), *, computed: bool = False) -> Run:
        """One forward of the live engine with ``interventions`` besides those that the side has anyway.

        Raises:
            RlkError: the engine failed, or cannot do what it was asked.
        """
        assert self.engine is not None and self.plan is not None
        self.runs += 1
        out = self.scratch / f"{self.role}-{self.runs}"
        plan = replace(
            self.plan,
            out=out,
            level="full",
            computed=out.with_name(f"{out.name}-computed") if computed else None,
            interventions=(*self.plan.interventions, *interventions),
            overwrite=True,
        )
        result = self.engine.capture(plan)
        return Run(Trace(result.trace), Trace(plan.computed) if plan.computed else None)

    def unlike_itself(self) -> str:
        """Where a forward on the recorded tokens differs from the traced one that drew them, in words; empty if
        nowhere.
        """
        run = self.run()
        why = unrepeated(self.trace, run.trace, self.name)
        run.discard()
        return why

    def lockstep(self, source: Trace, names: Iterable[str]) -> Run:
        """A forward on ``source``'s values at all ``names``.

        Raises:
            VoidError: afterwards some boundary does not hold the values that were put in.
        """
        chosen = list(names)
        run = self.run([Replace(name, source.folder) for name in chosen], computed=True)
        self._check(run, source, chosen)
        return run

    def spliced(self, source: Trace, replaced: Sequence[str], recomputed: Sequence[Intervention] = ()) -> Run:
        """A forward with ``source``'s values at ``replaced`` and the reference operator at ``recomputed``.

        Raises:
            VoidError: see `lockstep`.
        """
        run = self.run([*(Replace(name, source.folder) for name in replaced), *recomputed])
        self._check(run, source, replaced)
        return run

    def _check(self, run: Run, source: Trace, names: Sequence[str]) -> None:
        for name in names:
            if not same(run.trace, source, name):
                raise VoidError(f"{self.name} did not take the values put in at {name}")


def same(a: Trace, b: Trace, name: str) -> bool:
    """Whether two traces hold the same values at a boundary that both have, NaN as a class, dtypes aside."""
    x, y = a.entry(name), b.entry(name)
    if x.dtype == y.dtype:
        return x.sha256 == y.sha256
    return x.shape == y.shape and compare(a.values(name), x.dtype, b.values(name), y.dtype).equal


def unalignable(nodes: Sequence[Boundary], a: Trace, b: Trace) -> dict[str, str]:
    """Boundaries at which the values of one side cannot be put into the other, with the reason."""
    found = {}
    for node in nodes:
        if why := why_unobserved(node, a, b):
            found[node.name] = why
            continue
        if {t.entry(node.name).level for t in (a, b)} != {"full"}:
            found[node.name] = "the trace does not hold all its values (--level full does)"
            continue
        try:
            for source, target in ((a, b), (b, a)):
                kinds = source.entry(node.name).dtype, target.entry(node.name).dtype
                if kinds[0] != kinds[1]:
                    converted(node.name, source.values(node.name), *kinds)
        except InputError as error:
            found[node.name] = error.cause.partition(": ")[2]
    return found


def logprob_stats(left: Trace, right: Trace) -> LogprobStats:
    """Logprobs of two traces; ``left`` is the rollout side."""
    values: list[Any] = [to_float32(t.values("logprobs"), t.entry("logprobs").dtype) for t in (left, right)]
    differing = compare(values[0].view(np.uint32), "float32", values[1].view(np.uint32), "float32")
    a, b = (v[:, 0].astype(np.float64) for v in values)
    return LogprobStats.of(a, b, int(differing.rows.sum()))
