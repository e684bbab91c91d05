"""Where faults are put into real engines: pairs of live engines that are exactly equal until one of them is changed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from diffcheck.base.errors import InputError
from diffcheck.base.models import make_random_model
from diffcheck.base.progress import Progress
from diffcheck.base.samples import Sample
from diffcheck.capture.overrides import apply_overrides, parse_override
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.session import EngineSession
from diffcheck.faults.changes import Change
from diffcheck.faults.laboratory import SHAPE
from diffcheck.faults.outcome import Outcome
from diffcheck.faults.real_library import REAL_CONTROLS, REAL_FAULTS
from diffcheck.faults.runs import Lengths, RealFault, Run
from diffcheck.infer import explain
from diffcheck.infer.repeat import unrepeated, withdraw
from diffcheck.localize import localize
from diffcheck.trace.reader import Trace

#: Seconds for the inference of one side's contract.
_BUDGET = 120


@dataclass(frozen=True)
class _Side:
    """An engine that must be up, as data that can be compared."""

    engine: str
    profile: str | None
    dtype: str
    tied: bool
    ranks: int
    extra: tuple[tuple[str, Any], ...] = ()


def sides(run: Run) -> tuple[_Side, _Side]:
    """The healthy left engine and the faulty right one."""
    setup = run.setup
    alone = setup.alone or setup.profile is None
    other = "megatron" if run.engine == "vllm" else "vllm"

    def side(engine: str, ranks: int, extra: dict[str, Any]) -> _Side:
        # Prompts are in no cache when a capture begins, unless a fault puts them there; small blocks, so that it can.
        caching = {"enable_prefix_caching": True, "block_size": 16} if engine == "vllm" and setup.profile else {}
        options = tuple(sorted({**caching, **extra}.items()))
        return _Side(engine, setup.profile, setup.dtype, setup.tied, ranks, options)

    ranks = setup.tensor_parallel
    return (
        side(run.engine if alone else other, ranks, {}),
        side(run.engine, setup.right_ranks or ranks, setup.right),
    )


def describe(run: Run) -> str:
    """The pair in words: ``vllm, strict bfloat16``."""
    setup = run.setup
    words = f"{run.engine}, {'native' if setup.profile is None else 'strict'} {setup.dtype}"
    if setup.tied:
        words += ", tied head"
    ranks = setup.right_ranks or setup.tensor_parallel
    return words if ranks == 1 else f"{words}, {ranks} ranks"


@dataclass
class Engines:
    """Live engines by what they are, started when first asked for. Context manager: leaving it ends them all.

    Args:
        folder: for models, traces and logs.
    """

    folder: Path
    progress: Progress
    _live: dict[_Side, EngineSession] = field(default_factory=dict)
    _healthy: dict[tuple[_Side, str], Trace] = field(default_factory=dict)
    _runs: int = 0

    def model(self, tied: bool) -> Path:
        """The folder of the small random model."""
        folder = self.folder / ("tied" if tied else "model")
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            make_random_model(folder, **SHAPE, tie_word_embeddings=tied)
        return folder

    def start(self, *wanted: _Side) -> None:
        """Have these engines up. Two stay up at a time: those used last."""
        missing = [side for side in dict.fromkeys(wanted) if side not in self._live]
        for side in [side for side in self._live if side not in wanted][: max(0, len(self._live) + len(missing) - 2)]:
            self._live.pop(side).close()
        for side in dict.fromkeys(wanted):
            if side in self._live:
                self._live[side] = self._live.pop(side)
            else:
                options = EngineOptions(
                    side.engine,
                    self.model(side.tied),
                    side.dtype,
                    side.ranks,
                    profile=side.profile,
                    extra=dict(side.extra),
                )
                log = self.folder / f"{side.engine}-{self._runs}.log"
                self._live[side] = EngineSession(options, self.progress, log, module="diffcheck.faults.worker")

    def capture(self, side: _Side, plan: CapturePlan, changes: Sequence[Change], overrides: Sequence[str]) -> Trace:
        """One run of a live engine with ``changes`` inside it."""
        session = self._live[side]
        self._runs += 1
        out = self.folder / f"run{self._runs}"
        shutil.rmtree(out, ignore_errors=True)
        parsed = [parse_override(text) for text in overrides]
        _, plan = apply_overrides(parsed, session.options, replace(plan, out=out))
        return Trace(session.capture(plan, changes=[change.to_json() for change in changes]).trace)

    def healthy(self, side: _Side, plan: CapturePlan, changes: Sequence[Change]) -> Trace:
        """As `capture`, once for runs that share it."""
        key = side, json.dumps([plan.to_json(), [c.to_json() for c in changes]])
        if key not in self._healthy:
            self._healthy[key] = self.capture(side, plan, changes, ())
        return self._healthy[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._live.values():
            session.close(hurry=kind is not None)
        self._live.clear()


def run_real(fault: RealFault, run: Run, engines: Engines, explained: bool = True) -> Outcome:
    """Put one fault into one real engine, compare with the healthy side, and check what the tool names.

    Args:
        explained: also run inference where the run says which contract fields it must name.

    Raises:
        RlkError: the fault cannot be injected, which is an error and not a miss.
    """
    started = time.monotonic()
    outcome = Outcome(fault.name, describe(run), run.verdict, run.where)
    left_side, right_side = sides(run)
    engines.start(left_side, right_side)
    plan = CapturePlan(_samples(run.lengths), engines.folder, **run.plan)
    left = engines.healthy(left_side, plan, run.healthy)
    right_plan = _right_plan(plan, run)
    right = engines.capture(right_side, right_plan, run.changes, run.overrides)
    if run.happened and not right.header.evidence["scheduler"][run.happened]:
        raise InputError(f"fault {fault.name}: {describe(run)} counted no {run.happened}", "report this configuration")
    report = localize(left, right)
    if run.unsteady:
        again = engines.capture(right_side, right_plan, run.changes, run.overrides)
        withdraw(report, {"left": "", "right": unrepeated(right, again)})
    outcome.judge(report, run.spared)
    if (run.fields or run.unexplained) and explained and not outcome.wrong:
        model = engines.model(run.setup.tied)
        contracts = explain(report, left, right, model, budget=_BUDGET, probe=False)
        outcome.judge_fields([d["field"] for d in contracts["differs_in"]], run.fields)
    if run.then and not outcome.wrong:
        _check_second(run, plan, engines, outcome)
    outcome.seconds = time.monotonic() - started
    return outcome


def _check_second(run: Run, plan: CapturePlan, engines: Engines, outcome: Outcome) -> None:
    """With both faults in the right side the first is named; with the first in both sides, the second."""
    left_side, right_side = sides(run)
    right = engines.capture(right_side, plan, (*run.changes, *run.then), run.overrides)
    for left_changes, expected in ((run.healthy, run.where), (run.changes, run.then_where)):
        first = localize(engines.healthy(left_side, plan, left_changes), right).first_divergence
        if first is None or first.boundary != expected:
            outcome.wrong.append(f"of the two faults, named {first.boundary if first else 'nothing'}, not {expected}")


def _right_plan(plan: CapturePlan, run: Run) -> CapturePlan:
    """The healthy side's plan with what the run changes in it."""
    changes = dict(run.right_plan)
    split = changes.pop("split_token", None)
    if split is not None:
        first, second, *others = plan.samples
        ids = list(second.prompt_token_ids)
        # The same text, spelled with one token more.
        ids[split : split + 1] = [ids[split] - 1, ids[split] + 1]
        plan = replace(plan, samples=(first, replace(second, prompt_token_ids=tuple(ids)), *others))
    return replace(plan, **changes)


def _samples(lengths: Lengths) -> tuple[Sample, ...]:
    rng = np.random.default_rng(11)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(3, SHAPE["vocab_size"] - 1, n))

    return tuple(Sample(ids(prompt), ids(response)) for prompt, response in lengths)


def chosen(name: str | None, engine: str | None) -> Iterator[tuple[RealFault, Run]]:
    """The runs of one fault or of all, of one engine or of both, those that share engines next to each other.

    Raises:
        InputError: nothing fits.
    """
    library = {**REAL_FAULTS, **REAL_CONTROLS}
    faults = library.values() if name is None else [library[name]] if name in library else []
    found = [(f, r) for f in faults for r in f.runs if engine in (None, r.engine)]
    if not found:
        raise InputError(f"fault {name!r} cannot be put into {engine or 'a real engine'}", "see rlk-diff faults --list")
    order: dict[str, int] = {}
    for _, run in found:
        order.setdefault(_started(run), len(order))
    return iter(sorted(found, key=lambda pair: order[_started(pair[1])]))


def _started(run: Run) -> str:
    """The same for runs that can share their engines."""
    return repr(replace(run.setup, alone=False))
