"""A side that does not repeat itself cannot be explained: every conclusion from one run of it may be chance."""

from __future__ import annotations

from collections.abc import Mapping

from diffcheck.localize import localize
from diffcheck.localize.verdict import Verdict
from diffcheck.trace.reader import Trace


def unrepeated(first: Trace, second: Trace, name: str = "") -> str:
    """Where two runs of one side on the same object differ, in words; empty if nowhere.

    Args:
        name: of the side; default: its engine's.

    Raises:
        TraceError: a trace is damaged.
    """
    verdict = localize(first, second)
    engine = name or first.header.engine
    if verdict.first_divergence is not None:
        at = verdict.first_divergence
        where = f"{at.boundary} (sample {at.sample}, position {at.position})"
        return f"{engine} does not repeat itself: two runs of it first differ at {where}"
    if verdict.not_comparable:
        return f"{engine} does not repeat itself: two runs of it differ in {verdict.not_comparable[0].field}"
    return ""


def withdraw(verdict: Verdict, unsteady: Mapping[str, str]) -> bool:
    """Make ``verdict`` inconclusive if a side (left, right) does not repeat itself; whether one does not.

    What was compared stays in the verdict: it is what is known.
    """
    verdict.evidence["repeats"] = {side: not why for side, why in unsteady.items()}
    found = [why for why in unsteady.values() if why]
    if found and verdict.verdict == "diverged":
        verdict.verdict = "inconclusive"
        verdict.summary = f"{'; '.join(found)}. What differs between the sides may be chance."
    return bool(found)
