"""Ablation from end to end: all origins in one forward, what each unit is worth, the smallest set that explains."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from diffcheck.ablate.composite import Bench, align, left_out_at
from diffcheck.ablate.contracts import explained, known, parted
from diffcheck.ablate.result import Ablation, Pair, Removed, Trial, Unit, sides_in_words
from diffcheck.ablate.sides import Side, VoidError, unalignable
from diffcheck.ablate.units import grouped, origins, units_of
from diffcheck.ablate.walk import steps_planned, walk
from diffcheck.base.boundaries import Boundary
from diffcheck.base.progress import Progress, silent

#: Seconds after which no further forward is started, and seconds of inference a side and unit.
BUDGET = 600.0
INFERENCE = 30.0
#: Units of which pairs are tried: those that remove most alone.
PAIRED = 3
#: Boundaries of an interval that are named one by one.
SPELLED = 3


def ablate(
    host: Side,
    donor: Side,
    nodes: Sequence[Boundary],
    model: Path,
    *,
    infer: bool = False,
    budget: float = BUDGET,
    progress: Progress = silent,
) -> Ablation:
    """Explain the logprob mismatch of two sides by putting ``donor``'s operators into ``host``'s live forward.

    What is known when the time is up, or at Ctrl-C, is returned with the reason.

    Args:
        host: must be live. donor: gains from being live: its engine then proves every forward, see `composite`.
        nodes: the dataflow graph that both sides share.
        model: folder of the model's weights.
        infer: where no profile knows an operator, search its contract, and say in what the two differ.

    Raises:
        RlkError: an engine failed.
    """
    started = time.monotonic()
    unaligned = unalignable(nodes, donor.trace, host.trace)
    bench = Bench(host, donor, nodes, [n.name for n in nodes if n.name not in unaligned], model)
    answer = Ablation(host.name, donor.name, host.role, bench.baseline, unaligned=unaligned)
    experiment = _Experiment(bench, answer, infer, started + budget, progress)
    try:
        experiment.run()
    except VoidError as void:
        answer.void, answer.reason = True, f"{void}, so nothing follows from this engine's forwards"
    except _TimeUpError:
        answer.reason = f"the budget of {budget:.0f} s was spent"
    except KeyboardInterrupt:
        answer.reason = "interrupted"
    _conclude(answer, unaligned)
    answer.runs = {side.role: side.runs for side in (host, donor) if side.live}
    answer.seconds = round(time.monotonic() - started, 2)
    return answer


class _TimeUpError(Exception):
    """The budget is spent."""


class _Experiment:
    """One ablation under way; what it finds goes into its answer at once."""

    def __init__(self, bench: Bench, answer: Ablation, infer: bool, deadline: float, progress: Progress) -> None:
        self._bench, self._answer, self._infer = bench, answer, infer
        self._deadline, self._progress = deadline, progress
        self._members: Mapping[str, Sequence[str]] = {}
        self._planned = 0

    def run(self) -> None:
        """Fill the answer.

        Raises:
            VoidError: a substitution did not take place.
        """
        bench, answer = self._bench, self._answer
        if not bench.names:
            answer.reason = "no boundary holds values on both sides"
            return
        self._tick("all operators at once, each on the donor's inputs")
        run = bench.host.lockstep(bench.donor.trace, bench.names)
        answer.origins, _ = origins(bench.nodes, bench.names, bench.donor.trace, run.given)
        run.discard()
        bench.differing = [o.boundary for o in answer.origins]
        self._members = grouped(bench.differing)
        answer.units = units_of(bench.nodes, self._members, answer.origins)
        if not answer.baseline.mismatch_count:
            return
        self._plan()
        self._together()
        self._find_contracts()
        for unit in answer.units:
            unit.alone = self._align([unit.name], f"{unit.name} alone")
            unit.left_out = self._left_out(unit)
        self._minimise()
        self._pair()
        answer.bracket = walk(bench, answer.origins, self._tick)

    def _tick(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            raise _TimeUpError
        runs = self._bench.host.runs + self._bench.donor.runs
        self._progress(f"ablation: {what}", min(runs, self._planned), self._planned)

    def _plan(self) -> None:
        """Say what will be run before it is."""
        bench, answer = self._bench, self._answer
        host, donor = sides_in_words(answer.host, answer.donor, answer.host_side)
        units, checks = len(answer.units), 2 if bench.donor.live else 1
        pairs = min(units, PAIRED) * (min(units, PAIRED) - 1) // 2
        walking = steps_planned(len(answer.origins))
        answer.plan = [
            f"{len(answer.origins)} origins in {units} units, found by 1 forward of {host} on {donor}'s values",
            f"{units} units, each aligned alone and each left out, and {pairs} pairs: {2 * units + pairs} forwards"
            + (", each proven by one of the other engine" if bench.donor.live else ""),
            f"walking on: {walking} forwards",
        ]
        self._planned = 2 + checks * (2 * units + pairs) + walking
        self._progress("plan: " + "; ".join(answer.plan), 0, 0)

    def _together(self) -> None:
        """Everything aligned: is what was seen all that parts the two sides?"""
        bench, answer = self._bench, self._answer
        self._tick("every unit aligned")
        run = bench.host.spliced(bench.donor.trace, bench.differing)
        stats = bench.against_donor(run.trace)
        run.discard()
        removed = Removed.of(answer.baseline, stats)
        answer.together = Trial(list(self._members), stats, removed, "inputs", bench.host.name, 1)

    def _find_contracts(self) -> None:
        """What stands for each side's operators, and in what they differ: at once where profiles know both, else by
        inference, if asked.
        """
        bench = self._bench
        left, right = (bench.donor, bench.host) if bench.donor.role == "rollout" else (bench.host, bench.donor)
        for unit in self._answer.units:
            self._tick(f"contracts of {unit.name}")
            mine, other = (known(side, unit.boundaries, bench.names, bench.model) for side in (left, right))
            unit.differs_in = parted(mine, other, unit.boundaries[-1])
            if self._infer and not unit.differs_in:
                unit.differs_in, unit.unexplained, answers = explained(
                    left, right, unit.boundaries[-1], bench.model, INFERENCE, self._progress
                )
                mine = known(left, unit.boundaries, bench.names, bench.model, answers[0])
                other = known(right, unit.boundaries, bench.names, bench.model, answers[1])
            for side, found in ((left, mine), (right, other)):
                if side is bench.donor:
                    unit.donor_contract = found.source
                else:
                    unit.host_contract = found.source
                if found.operator is not None:
                    operators = bench.operators.setdefault(side.role, {})
                    operators.update(dict.fromkeys(unit.boundaries, found.operator))

    def _align(self, aligned: Iterable[str], what: str) -> Trial | None:
        self._tick(what)
        return align(self._bench, self._members, list(aligned))

    def _left_out(self, unit: Unit) -> Trial | None:
        others = [name for name in self._members if name != unit.name]
        trial = self._align(others, f"all but {unit.name}")
        if not _proven(trial) and self._bench.donor.live:
            # Too deep to be settled whole. That one place of it is needed shows that the unit is.
            self._tick(f"all but {unit.boundaries[0]}")
            trial = left_out_at(self._bench, self._members, unit.boundaries[0])
        return trial

    def _minimise(self) -> None:
        """Drop what is not needed, then see that every member that is left is.

        The units that can be left out one by one are first left out together, then, if that leaves a mismatch, one
        after the other.
        """
        answer = self._answer
        if answer.together is None or answer.together.logprobs.mismatch_count:
            return
        kept = [u.name for u in answer.units]
        spare = [u.name for u in answer.units if u.left_out and _explains(u.left_out)]
        if spare:
            for drop in [spare] if len(spare) == 1 else [spare, *([name] for name in spare)]:
                smaller = [name for name in kept if name not in drop]
                trial = self._align(smaller, f"without {', '.join(drop)}")
                if _explains(trial):
                    kept, answer.together = smaller, trial
                    if drop is spare:
                        break
        needed = [_breaks(u.left_out) for u in answer.units if u.name in kept]
        if len(kept) < len(answer.units):
            needed = [
                _breaks(self._align([n for n in kept if n != name], f"the minimal set without {name}")) for name in kept
            ]
        answer.minimal, answer.minimal_verified = kept, all(needed)
        for unit in answer.units:
            unit.in_minimal = unit.name in kept

    def _pair(self) -> None:
        """How the units that remove most act together."""

        def removes(unit: Unit) -> float:
            assert unit.alone is not None
            return unit.alone.removed.mean

        judged = [u for u in self._answer.units if _proven(u.alone)]
        strongest = sorted(judged, key=removes, reverse=True)[:PAIRED]
        chosen = [u for u in judged if u in strongest]
        for a, b in combinations(chosen, 2):
            trial = self._align([a.name, b.name], f"{a.name} with {b.name}")
            if trial is not None:
                self._answer.pairs.append(Pair((a.name, b.name), (removes(a), removes(b)), trial))


def in_words(unit: Unit) -> str:
    """Its name, or what it may be where boundaries before it were not observed."""
    if len(unit.interval) == 1:
        return unit.name
    if len(unit.interval) <= SPELLED:
        return " → ".join(unit.interval)
    return f"one of the {len(unit.interval)} from {unit.interval[0]} to {unit.interval[-1]}"


def _proven(trial: Trial | None) -> bool:
    return trial is not None and trial.evidence != "unproven"


def _explains(trial: Trial | None) -> bool:
    return trial is not None and _proven(trial) and not trial.logprobs.mismatch_count


def _breaks(trial: Trial | None) -> bool:
    return trial is not None and _proven(trial) and trial.logprobs.mismatch_count > 0


def _conclude(answer: Ablation, unaligned: Mapping[str, str]) -> None:
    """Status and one sentence."""
    compared, before = answer.baseline.compared, answer.baseline.mismatch_count
    if not before and not answer.reason:
        answer.status = "explained"
        answer.summary = f"All {compared:,} logprobs are equal: what differs before them is absorbed on the way."
        return
    if answer.together is None:
        answer.summary = "Which operators part the logprobs is not known."
        return
    left = answer.together.logprobs
    if left.mismatch_count:
        answer.status = "remainder"
        answer.summary = (
            f"With every origin aligned, {left.mismatch_count:,} of {compared:,} logprobs still differ "
            f"(max |difference| {left.max_abs_diff:.3g}): a remainder that no boundary shows."
        )
        seen = ", ".join(list(unaligned)[:3])
        answer.reason = answer.reason or (f"not aligned: {seen}" if seen else "")
        return
    host, donor = sides_in_words(answer.host, answer.donor, answer.host_side)
    needed = [u for u in answer.units if u.in_minimal] or answer.units
    count = f"{len(needed)} operators" if len(needed) > 1 else "1 operator"
    answer.summary = (
        f"{count} of {donor} in {host}'s forward make all {compared:,} logprobs equal "
        f"({before:,} differed): {', '.join(map(in_words, needed))}."
    )
    if answer.reason:
        return
    answer.status = "explained"
    if not answer.minimal_verified:
        answer.reason = "that each of them is needed was not proven for all"
