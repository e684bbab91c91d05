"""Inference over traces: one side at one boundary, and both sides at the boundary where they part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.progress import Progress, silent
from diffcheck.infer.answer import Inference, Undecided, differences
from diffcheck.infer.candidates import Candidates
from diffcheck.infer.journal import Journal
from diffcheck.infer.probes import decide
from diffcheck.infer.scalar_search import find_scalar
from diffcheck.infer.search import Clock, Found, search
from diffcheck.infer.sites import Site, UnknowableError, node_of, site
from diffcheck.infer.trial import Trial
from diffcheck.infer.weights import TracedWeights
from diffcheck.localize.compare import compare_boundary, why_unobserved
from diffcheck.localize.prompts import PROMPT_LOGPROBS
from diffcheck.localize.verdict import Verdict
from diffcheck.rows import IntArray
from diffcheck.trace.reader import Trace
from diffcheck.trace.roles import side_names
from reference.contract import Contract, Value, fields, operator_name, profile, profiles, space

#: Rows sampled before all are looked at, and seconds per side.
ROWS = 64
BUDGET = 60.0
#: Contracts that fit the other side with which a scalar of this one is looked for.
_HINTS = 8


def infer(
    trace: Trace,
    boundary: str,
    model: Path,
    *,
    rows: int = ROWS,
    budget: float = BUDGET,
    prefer: IntArray | None = None,
    probe: bool = True,
    progress: Progress = silent,
) -> Inference:
    """Find every contract that gives ``boundary``'s bits from the trace's own inputs.

    Args:
        model: folder with the traced model's weights; they are checked against the trace's digests.
        rows: rows sampled before the contracts that are left are confirmed on all.
        budget: seconds.
        prefer: row numbers of the boundary that tell most, e.g. those that differ between two sides.
        probe: also generate, for each undecided field, an input that would decide it.

    Raises:
        InputError: no such boundary, or weights that are not the traced ones.
        TraceError: the trace is damaged.
    """
    return _Side(trace, boundary, model, rows, budget, prefer, probe, progress).answer


class _Side:
    """One side's answer, and what it takes to go on where no contract fits."""

    def __init__(
        self,
        trace: Trace,
        boundary: str,
        model: Path,
        rows: int,
        budget: float,
        prefer: IntArray | None,
        probe: bool,
        progress: Progress,
    ) -> None:
        started = time.monotonic()
        node = node_of(trace, boundary)
        operator = operator_name("all_reduce" if node.operator == "all_reduce" else boundary)
        self.answer = answer = Inference(boundary, operator, trace.header.engine, "inconclusive")
        self._rows, self._clock, self._progress = rows, Clock(budget), progress
        self._asked: tuple[Site, Candidates] | None = None
        weights = TracedWeights(model, trace.header.object.weights, trace.header.dtype)
        progress(f"reading {boundary}", 0, 0)
        try:
            question = site(trace, boundary, weights)
        except UnknowableError as why:
            answer.reason = str(why)
            return
        clock = self._clock = Clock(budget)
        preferred = None if prefer is None else np.flatnonzero(np.isin(question.rows, prefer))
        question, trial, candidates, found = _search(trace, question, rows, preferred, clock, progress)
        _fill(answer, question, candidates, found)
        answer.columns, answer.width = trial.width, question.target.shape[1]
        if answer.fits:
            answer.decided, answer.undecided = _fields(
                question, candidates, [*found.fits, *found.pending], clock if probe else Clock(0)
            )
        else:
            self._asked = question, candidates
            self.look_for_scalar([found.nearest] if found.nearest is not None else [])
        answer.seconds = time.monotonic() - started

    def look_for_scalar(self, hints: Sequence[Contract]) -> None:
        """Where no contract fits: whether one does with another scalar than the configured one, in the time left."""
        if self._asked is None or self.answer.scalar is not None or self._clock.over:
            return
        try:
            self.answer.scalar = find_scalar(*self._asked, self._rows, hints, self._clock, self._progress)
        except KeyboardInterrupt:
            self._clock.interrupted = True
        if self.answer.scalar is not None:
            self.answer.reason = "with the configured value no contract that was tried gives these bits"


def _search(
    trace: Trace, question: Site, rows: int, preferred: IntArray | None, clock: Clock, progress: Progress
) -> tuple[Site, Trial, Candidates, Found]:
    """The search; a log-probability without an observed log-sum-exp is tried with that of every known profile."""
    best: tuple[Site, Trial, Candidates, Found] | None = None
    for name, asked in _with_logsumexp(question):
        candidates, trial = Candidates.of(asked), Trial(asked, rows, preferred)
        journal = Journal(trace, trial, candidates)
        try:
            found = search(trial, candidates, clock, progress, journal.get)
        except BaseException:
            clock.interrupted = True
            raise
        finally:
            journal.close(finished=not clock.over)
        if clock.over and not found.complete:
            found.stopped += "; run again, it goes on from there"
        if name:
            found.complete = False
            found.stopped = (
                f"the log-sum-exp inside was not observed: it is taken as in {name}, the best of the profiles"
            )
        if best is None or (bool(found.fits), found.score.share) > (bool(best[3].fits), best[3].score.share):
            best = (asked, trial, candidates, found)
        if best[3].fits:
            break
    assert best is not None
    return best


def _with_logsumexp(question: Site) -> list[tuple[str, Site]]:
    """(profile, question with its log-sum-exp), or the question itself where it needs none."""
    arguments = question.arguments
    if arguments.operator != "logprob" or "lse" in arguments.rows:
        return [("", question)]
    contracts: dict[Contract, str] = {}
    for name in profiles.names():
        contracts.setdefault(profile(name).contract("logsumexp", question.model_dtype), name)
    return [
        (name, replace(question, arguments=replace(arguments, facts={**arguments.facts, "logsumexp": contract})))
        for contract, name in contracts.items()
    ]


def _fill(answer: Inference, question: Site, candidates: Candidates, found: Found) -> None:
    answer.fits, answer.pending, answer.nearest = found.fits, found.pending, found.nearest
    if found.nearest is not None:
        answer.nearest_fields = dict(zip(candidates.axes, candidates.values(found.nearest), strict=True))
    answer.rows, answer.total_rows = len(question.arguments), question.total_rows
    score = found.score
    answer.elements, answer.matching, answer.max_ulp = score.elements, score.matching, score.max_ulp
    answer.rows_failing = score.rows_failing
    answer.tried, answer.space, answer.complete = found.tried, found.total, found.complete
    members = set(found.fits)
    answer.profiles = [name for name, contract in candidates.known() if contract in members]
    if found.fits:
        answer.status, answer.reason = "match", "" if found.complete else found.stopped
        if found.complete and found.total > 1 and len(found.fits) == sum(1 for _ in candidates.contracts()):
            answer.status = "inconclusive"
            answer.reason = f"every contract of the space fits these {answer.rows} rows: they decide nothing"
    elif found.complete:
        answer.status = "no_match"
        answer.reason = "no contract of the space gives these bits: what the engine does there is outside it"
    else:
        answer.reason = f"no contract that was tried gives these bits, and {found.stopped}"


def _fields(
    question: Site, candidates: Candidates, fits: Sequence[Contract], clock: Clock
) -> tuple[dict[str, Value], list[Undecided]]:
    """Which fields the class agrees on, and why it does not on the others."""
    operator = candidates.operator
    decided: dict[str, Value] = {}
    undecided = []
    for path, allowed in space(operator, question.model_dtype).axes.items():
        if path in question.hidden and len(allowed) > 1:
            undecided.append(Undecided(path, allowed, question.hidden[path]))
        elif path in candidates.axes:
            values = tuple(v for v in allowed if any(c.get(path) == v for c in fits))
            if len(values) == 1:
                decided[path] = values[0]
            else:
                undecided.append(_undecided(path, values, question, fits, clock))
    return decided, undecided


def _undecided(
    path: str, values: tuple[Value, ...], question: Site, fits: Sequence[Contract], clock: Clock
) -> Undecided:
    if clock.over:
        return Undecided(path, values, "the same bits on all these rows")
    probe = decide(path, fits, question.arguments, question.model_dtype)
    if probe is not None:
        return Undecided(path, values, "the same bits on all these rows; a generated input tells them apart", probe)
    if path == "primitives.mean" and question.arguments.norm_size.bit_count() == 1:
        return Undecided(path, values, "the row's length is a power of two: dividing and multiplying are both exact")
    equivalent = fields(type(fits[0]))[path].equivalent
    return Undecided(path, values, equivalent or "the same bits on all these rows and on all generated inputs")


def explain(
    verdict: Verdict,
    left: Trace,
    right: Trace,
    model: Path,
    *,
    rows: int = ROWS,
    budget: float = BUDGET,
    probe: bool = True,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Fill ``verdict.contracts`` at its first divergence: both sides' answers and the fields in which they differ.

    Returns:
        What was filled in; unchanged if nothing diverged.

    Raises:
        InputError, TraceError: see `infer`.
    """
    first = verdict.first_divergence
    # Prompt logprobs are no operator's output.
    if first is None or first.boundary == PROMPT_LOGPROBS:
        return verdict.contracts
    prefer = _differing_rows(first.boundary, left, right, first.rows)
    asked = [_Side(trace, first.boundary, model, rows, budget, prefer, probe, progress) for trace in (left, right)]
    sides = [side.answer for side in asked]
    for one, other in zip(asked, reversed(sides), strict=True):
        one.look_for_scalar(other.fits[:_HINTS])
    for side, name in zip(sides, side_names(sides[0].engine, sides[1].engine), strict=True):
        side.engine = name
    verdict.contracts = {
        "left": [sides[0].to_json()],
        "right": [sides[1].to_json()],
        "differs_in": differences(*sides),
    }
    return verdict.contracts


def _differing_rows(boundary: str, left: Trace, right: Trace, rows: int) -> IntArray | None:
    node = node_of(left, boundary)
    if why_unobserved(node, left, right):
        return None
    return np.flatnonzero(compare_boundary(node, left, right, rows).rows)
