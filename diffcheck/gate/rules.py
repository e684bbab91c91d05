"""Rules: what must hold for a gate to open, and how each is judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from diffcheck.base.errors import ExitCode
from diffcheck.gate.subject import Subject
from reference.contract.names import offered

#: not_comparable: the sides did not compute the same object, so no figure says anything. undecided: what the rule is
#: about was not seen.
Outcome = Literal["holds", "broken", "not_comparable", "undecided"]
_DIFFERS = ("origin", "receiver")


@dataclass(frozen=True)
class Rules:
    """What must hold. None: not asked."""

    max_mismatch: int | None = None
    #: Nats.
    max_abs_diff: float | None = None
    max_k3: float | None = None
    #: Boundaries that may differ.
    max_boundaries: int | None = None
    #: Share of the boundaries that both sides must show.
    min_coverage: float | None = None
    #: Logprobs that must have been compared.
    min_compared: int = 1
    #: Patterns of boundaries that must be equal.
    must_equal: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ruling:
    """One rule, judged."""

    rule: str
    outcome: Outcome
    #: What was found, in words.
    found: str


def judge(subject: Subject, rules: Rules) -> list[Ruling]:
    """Judge every rule that is asked. "comparable" and "compared" always are: a gate that compared nothing is shut."""
    return list(_rulings(subject, rules))


def _rulings(s: Subject, rules: Rules) -> Iterator[Ruling]:
    if s.verdict == "not_comparable":
        yield Ruling("comparable", "not_comparable", s.summary)
        return
    inconclusive = s.verdict == "inconclusive"
    yield Ruling("comparable", "undecided" if inconclusive else "holds", s.summary)
    enough = s.compared >= rules.min_compared
    yield Ruling(
        f"compared at least {rules.min_compared:,}",
        "holds" if enough else "undecided",
        f"{s.compared:,} logprobs were compared",
    )
    found = f"{s.mismatch_count:,} of {s.compared:,} logprobs differ"
    yield from _limit("mismatches", rules.max_mismatch, s.mismatch_count, found, s.compared)
    nats = f"the largest difference is {s.max_abs_diff:.3g} nats"
    yield from _limit("largest difference", rules.max_abs_diff, s.max_abs_diff, nats, s.compared)
    yield from _limit("k3", rules.max_k3, s.k3, f"k3 is {s.k3:.3g} nats", s.compared)
    yield from _on_boundaries(s, rules)


def _limit(what: str, limit: float | None, value: float, found: str, compared: int) -> Iterator[Ruling]:
    if limit is None:
        return
    # A NaN is below no limit.
    outcome: Outcome = "undecided" if not compared else "holds" if value <= limit else "broken"
    yield Ruling(f"{what} at most {limit:,}", outcome, found if compared else "no logprob was compared")


def _on_boundaries(s: Subject, rules: Rules) -> Iterator[Ruling]:
    unseen = f"{s.name} holds no boundaries"
    if rules.max_boundaries is not None:
        rule = f"differing boundaries at most {rules.max_boundaries}"
        if s.boundaries is None:
            yield Ruling(rule, "undecided", unseen)
        else:
            seen = [status for status in s.boundaries.values() if status != "unobserved"]
            differing = sum(status in _DIFFERS for status in seen)
            outcome: Outcome = "broken" if differing > rules.max_boundaries else "holds" if seen else "undecided"
            yield Ruling(rule, outcome, f"{differing} of {len(seen)} observed boundaries differ")
    if rules.min_coverage is not None:
        rule = f"coverage at least {rules.min_coverage:g}"
        if not s.expected:
            yield Ruling(rule, "undecided", unseen)
        else:
            assert s.observed is not None
            outcome = "holds" if s.observed >= rules.min_coverage * s.expected else "broken"
            yield Ruling(rule, outcome, f"{s.observed} of {s.expected} boundaries were observed on both sides")
    for pattern in rules.must_equal:
        yield _must_equal(s, pattern)


def _must_equal(s: Subject, pattern: str) -> Ruling:
    rule = f"{pattern} equal"
    matching = {n: status for n, status in (s.boundaries or {}).items() if fnmatchcase(n, pattern)}
    if not matching:
        return Ruling(rule, "undecided", f"no boundary has this name; {offered(pattern, s.boundaries or {})}")
    if differing := [name for name, status in matching.items() if status in _DIFFERS]:
        return Ruling(rule, "broken", f"{len(differing)} of {len(matching)} differ, first {differing[0]}")
    if hidden := [name for name, status in matching.items() if status == "unobserved"]:
        return Ruling(rule, "undecided", f"{len(hidden)} of {len(matching)} were not observed, first {hidden[0]}")
    return Ruling(rule, "holds", f"all {len(matching)} are equal")


def exit_code(rulings: Sequence[Ruling]) -> ExitCode:
    """1 if a rule is broken, else 3 if a subject is not comparable, else 4 if a rule is undecided, else 0."""
    outcomes = {r.outcome for r in rulings}
    if "broken" in outcomes:
        return ExitCode.DIVERGED
    if "not_comparable" in outcomes:
        return ExitCode.NOT_COMPARABLE
    return ExitCode.INCONCLUSIVE if "undecided" in outcomes or not outcomes else ExitCode.EQUAL
