"""What a gate judges: the figures of one verdict, or of one run of GRPO, read from its files."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from diffcheck.base.documents import MIB, DocumentError, parse_json, read_bounded
from diffcheck.base.errors import InputError
from diffcheck.localize.verdict import Verdict

#: Bytes of the largest verdict or step log that is read.
_LIMIT = 256 * MIB
STEPS = "steps.jsonl"
_REMEDY = "give a file that `rlk-diff localize --json` or `compare --json` wrote, or the folder of an rlk-grpo run"


@dataclass(frozen=True)
class Subject:
    """The figures that rules are about. None: this source does not have them."""

    name: str
    #: equal, diverged, not_comparable or inconclusive.
    verdict: str
    summary: str
    compared: int = 0
    mismatch_count: int = 0
    #: Nats.
    max_abs_diff: float = 0.0
    k3: float = 0.0
    observed: int | None = None
    expected: int | None = None
    #: Boundary -> equal, origin, receiver or unobserved.
    boundaries: dict[str, str] | None = None
    seconds: float | None = None
    #: What JUnit shows as properties: versions and the like.
    properties: dict[str, str] = field(default_factory=dict)


class _Logprobs(msgspec.Struct):
    compared: int
    mismatch_count: int
    max_abs_diff: float | str
    k3: float | str


class _Boundary(msgspec.Struct):
    name: str
    status: str


class _Coverage(msgspec.Struct):
    observed: int
    expected: int


class _Verdict(msgspec.Struct):
    schema: int
    verdict: str
    boundaries: list[_Boundary]
    coverage: _Coverage
    summary: str = ""
    logprobs: _Logprobs | None = None
    evidence: dict[str, Any] = {}


class _Step(msgspec.Struct):
    step: int
    compared: int
    mismatch_count: int
    max_abs_diff: float
    k3: float


def read_subject(path: Path) -> Subject:
    """The figures of a verdict's JSON, or of a run's folder.

    Raises:
        InputError: there is no such file, it is none of the two, damaged or too large; file and field are named.
    """
    return _of_run(path) if path.is_dir() else _of_file(path)


def of_verdict(verdict: Verdict, name: str) -> Subject:
    """The figures of a verdict that was just reached."""
    return _subject(msgspec.convert(verdict.to_json(), _Verdict), name)


def _of_file(path: Path) -> Subject:
    try:
        data = parse_json(read_bounded(path, _LIMIT))
        found = msgspec.convert(data, _Verdict)
        _check(found)
    except (DocumentError, ValueError) as error:
        raise InputError(f"{path}: {error}", _REMEDY) from None
    return _subject(found, str(path))


def _check(found: _Verdict) -> None:
    if found.schema != 1:
        raise ValueError(f"schema {found.schema}; this rlk reads verdicts of schema 1")
    if found.verdict not in ("equal", "diverged", "not_comparable", "inconclusive"):
        raise ValueError(f"verdict {found.verdict!r} is none that rlk-diff writes")
    for boundary in found.boundaries:
        if boundary.status not in ("equal", "origin", "receiver", "unobserved"):
            raise ValueError(f"boundary {boundary.name!r}: status {boundary.status!r} is none that rlk-diff writes")
    _counts("coverage.observed", found.coverage.observed, found.coverage.expected)
    if found.logprobs:
        _counts("logprobs.mismatch_count", found.logprobs.mismatch_count, found.logprobs.compared)


def _counts(field_name: str, part: int, whole: int) -> None:
    if not 0 <= part <= whole:
        raise ValueError(f"{field_name} {part} of {whole}")


def _subject(found: _Verdict, name: str) -> Subject:
    logprobs = found.logprobs or _Logprobs(0, 0, 0.0, 0.0)
    properties = {
        f"{side}.{key}": str(value)
        for side in ("left", "right")
        if isinstance(of := found.evidence.get(side), dict)
        for key, value in of.items()
        if isinstance(value, str | int)
    }
    seconds = found.evidence.get("seconds")
    return Subject(
        name=name,
        verdict=found.verdict,
        summary=found.summary,
        compared=logprobs.compared,
        mismatch_count=logprobs.mismatch_count,
        max_abs_diff=float(logprobs.max_abs_diff),
        k3=float(logprobs.k3),
        observed=found.coverage.observed,
        expected=found.coverage.expected,
        boundaries={b.name: b.status for b in found.boundaries},
        seconds=sum(v for v in seconds.values() if isinstance(v, int | float)) if isinstance(seconds, dict) else None,
        properties=properties,
    )


def _of_run(folder: Path) -> Subject:
    """Totals over the finished steps of an rlk-grpo run."""
    path = folder / STEPS
    steps: list[_Step] = []
    try:
        # What follows the last line's end is a step that a crash tore.
        for number, line in enumerate(read_bounded(path, _LIMIT).split(b"\n")[:-1], 1):
            step = msgspec.convert(parse_json(line, literals=True), _Step)
            if step.step != number:
                raise ValueError(f"line {number} is the record of step {step.step}")
            _counts(f"line {number}: mismatch_count", step.mismatch_count, step.compared)
            steps.append(step)
    except (DocumentError, ValueError) as error:
        raise InputError(f"{path}: {error}", _REMEDY) from None
    differing = [s for s in steps if s.mismatch_count]
    mismatches = sum(s.mismatch_count for s in steps)
    compared = sum(s.compared for s in steps)
    where = f", first in step {differing[0].step}" if differing else ""
    verdict = "diverged" if differing else "equal" if compared else "inconclusive"
    return Subject(
        name=str(folder),
        verdict=verdict,
        summary=f"{mismatches:,} of {compared:,} logprobs differ in {len(steps)} steps{where}",
        compared=compared,
        mismatch_count=mismatches,
        max_abs_diff=_largest([s.max_abs_diff for s in steps]),
        k3=_largest([s.k3 for s in steps]),
    )


def _largest(values: list[float]) -> float:
    """The largest; NaN if one is, because no limit holds then."""
    return math.nan if any(math.isnan(v) for v in values) else max(values, default=0.0)
