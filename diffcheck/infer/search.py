"""The search: few rows first, survivors on more, what is left on all; in huge spaces field by field.

A contract is dropped as soon as one element of one row differs, so nearly all of a space costs one row each. Contracts
that are left have reproduced every element looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from diffcheck.base.progress import Progress
from diffcheck.infer.candidates import Candidates
from diffcheck.infer.trial import Score, Trial
from reference.contract import Contract
from reference.dot import remember

#: How a contract does at one of a trial's levels (its index); None where it is impossible for the shapes.
Scorer = Callable[[Contract, int], Score | None]

#: Starting points and members of a class that a search field by field goes through.
_STARTS = 3
_MEMBERS = 256
#: Seconds for that walk, so that time is left to look for deciding inputs.
_WALK_SECONDS = 20.0
#: Best misses that are looked at more closely, to name the nearest.
_NEAREST = 8


@dataclass
class Found:
    """What a search knows at its end, or when it was stopped."""

    #: Every contract that reproduced all bits, the likeliest first.
    fits: list[Contract] = field(default_factory=list)
    #: Contracts that reproduced all bits so far, when time ran out before they were confirmed on all rows.
    pending: list[Contract] = field(default_factory=list)
    #: Where none did: the best one and how it did on the sampled rows.
    nearest: Contract | None = None
    score: Score = field(default_factory=lambda: Score(0, 0))
    #: Different computations that were run, and that there are.
    tried: int = 0
    total: int = 0
    #: Whether every contract of the space was either refuted or confirmed.
    complete: bool = False
    stopped: str = ""


class Clock:
    """The time budget. ``over`` is also true after Ctrl-C, so that what is known is reported."""

    def __init__(self, budget: float) -> None:
        self._end = time.monotonic() + budget
        self.interrupted = False

    def at_most(self, seconds: float) -> Clock:
        """A clock that runs out with this one, or earlier."""
        return Clock(min(seconds, self._end - time.monotonic()))

    @property
    def over(self) -> bool:
        return self.interrupted or time.monotonic() > self._end

    @property
    def reason(self) -> str:
        return "it was interrupted" if self.interrupted else "the time budget was spent"


class _Board:
    """Misses, best first: how far each contract got, and how well it did there."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, float, int, Contract]] = []

    def note(self, level: int, score: Score, contract: Contract) -> None:
        self._entries.append((level, score.share, -len(self._entries), contract))
        if len(self._entries) > 64 * _NEAREST:
            self._entries = sorted(self._entries, reverse=True, key=lambda e: e[:3])[:_NEAREST]

    def best(self) -> list[Contract]:
        return [e[3] for e in sorted(self._entries, reverse=True, key=lambda e: e[:3])[:_NEAREST]]


def search(
    trial: Trial, candidates: Candidates, clock: Clock, progress: Progress, score: Scorer | None = None
) -> Found:
    """Find every contract of the space that gives the side's bits.

    Args:
        score: `Trial.at` of ``trial`` with a memory that outlives an interruption; None: without one.
    """
    score = score or trial.at
    board = _Board()
    found = Found()
    try:
        if candidates.exhaustive:
            _screen(trial, score, candidates, clock, progress, board, found)
        else:
            _climb(trial, score, candidates, clock, progress, board, found)
    except KeyboardInterrupt:
        clock.interrupted = True
    if not found.complete:
        found.stopped = found.stopped or clock.reason
    if not found.fits:
        _name_nearest(trial, score, board, found)
    return found


def _screen(
    trial: Trial,
    score: Scorer,
    candidates: Candidates,
    clock: Clock,
    progress: Progress,
    board: _Board,
    found: Found,
) -> None:
    """Every computation of the space on one row, what is left on four, and so on."""
    found.total = candidates.count
    alive: Iterable[Contract] = candidates.contracts()
    count = found.total
    for depth, level in enumerate(trial.levels):
        what = f"{candidates.operator}: {count:,} contracts on {level.rows.size} of {len(trial.site.arguments)} rows"
        passed: list[Contract] = []
        with remember():
            remaining = iter(alive)
            for done, contract in enumerate(remaining):
                if clock.over:
                    # Only what was confirmed on all rows is called a fit.
                    if level is trial.levels[-1]:
                        found.fits, found.pending = passed, [contract, *remaining]
                    return
                progress(what, done, count)
                result = score(contract, depth)
                found.tried += depth == 0
                if result is None:
                    continue
                if result.fits:
                    passed.append(contract)
                    found.score = result
                else:
                    board.note(depth, result, contract)
        alive, count = passed, len(passed)
    found.tried, found.complete, found.fits = found.total, True, passed


def _climb(
    trial: Trial,
    compute: Scorer,
    candidates: Candidates,
    clock: Clock,
    progress: Progress,
    board: _Board,
    found: Found,
) -> None:
    """From the profiles, change one field at a time while that brings more elements into agreement; from a contract
    that fits, walk to its neighbours that fit too. Not a proof that there are no others.
    """
    found.total = candidates.bound
    seen: dict[tuple[Contract, int], Score | None] = {}

    def score(contract: Contract, depth: int) -> Score | None:
        if (contract, depth) not in seen:
            found.tried += 1
            progress(f"{candidates.operator}: field by field", found.tried % 1000, 1000)
            seen[contract, depth] = compute(contract, depth)
        return seen[contract, depth]

    last = len(trial.levels) - 1
    middle = min(1, last)
    starts = [(s.share, -i, c) for i, (_, c) in enumerate(candidates.known()) if (s := score(c, middle)) is not None]
    for _, _, start in sorted(starts, reverse=True)[:_STARTS]:
        contract = start
        for depth in range(middle, last + 1):
            while not clock.over:
                here = score(contract, depth)
                if here is None or here.fits:
                    break
                board.note(depth, here, contract)
                step = _best_step(contract, candidates, partial(score, depth=depth), clock)
                if step is None or step[0].share <= here.share:
                    break
                contract = step[1]
            if clock.over:
                return
            reached = score(contract, depth)
            if reached is None or not reached.fits:
                break
        else:
            limit = clock.at_most(_WALK_SECONDS)
            _walk_class(contract, candidates, limit, lambda c: compute(c, 0), lambda c: score(c, last), found)
            return
    found.stopped = "the space is too large to try every contract; the known profiles and their neighbours were tried"


def _best_step(
    contract: Contract, candidates: Candidates, score: Callable[[Contract], Score | None], clock: Clock
) -> tuple[Score, Contract] | None:
    best: tuple[Score, Contract] | None = None
    for neighbour in candidates.neighbours(contract):
        s = None if clock.over else score(neighbour)
        if s is not None and (best is None or s.share > best[0].share):
            best = (s, neighbour)
            if s.fits:
                break
    return best


def _walk_class(
    start: Contract,
    candidates: Candidates,
    clock: Clock,
    first: Callable[[Contract], Score | None],
    score: Callable[[Contract], Score | None],
    found: Found,
) -> None:
    """Contracts that fit and are connected to ``start`` by changes of one field."""
    reached = score(start)
    assert reached is not None
    found.score = reached
    found.fits, frontier = [start], [start]
    known = set(found.fits)
    while frontier and not clock.over and len(found.fits) < _MEMBERS:
        for neighbour in candidates.neighbours(frontier.pop(0)):
            if clock.over or neighbour in known:
                continue
            known.add(neighbour)
            # The first level refutes most of them at the cost of one row.
            one_row = first(neighbour)
            if one_row is None or not one_row.fits:
                continue
            s = score(neighbour)
            if s is not None and s.fits:
                found.fits.append(neighbour)
                frontier.append(neighbour)
    found.stopped = "the space is too large to try every contract: others may fit too"


def _name_nearest(trial: Trial, score: Scorer, board: _Board, found: Found) -> None:
    """The best miss on the sampled rows."""
    every = len(trial.levels) - 1
    for contract in board.best():
        s = score(contract, every - 1)
        if s is not None and (found.nearest is None or s.share > found.score.share):
            found.nearest, found.score = contract, s
    if found.nearest is not None:
        found.score = score(found.nearest, every) or found.score


__all__ = ["Clock", "Found", "Scorer", "search"]
