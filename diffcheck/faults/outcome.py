"""What the tool said of one injected fault, and how good that was over many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diffcheck.localize.verdict import Verdict


@dataclass
class Outcome:
    """One injection and what was named."""

    name: str
    #: Engine in which the fault is, and how the pair was started: "reference", "vllm, strict bfloat16".
    engine: str
    #: What was declared before the run: verdict, and the boundary or field (its beginning) that must be named first.
    expected: str
    where: str
    #: What the tool said.
    verdict: str = ""
    named: str = ""
    #: Contract fields named as the difference.
    fields: list[str] = field(default_factory=list)
    #: What is not as expected; empty if the fault was found.
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    report: Verdict | None = None

    @property
    def found(self) -> bool:
        return not self.wrong

    def judge(self, report: Verdict, spared: int = 0) -> None:
        """Hold ``report`` against what was expected.

        Args:
            spared: positions [0, N) at which the fault cannot act.
        """
        first = report.first_divergence
        self.report, self.verdict = report, report.verdict
        self.named = first.boundary if first else report.not_comparable[0].field if report.not_comparable else ""
        if self.verdict != self.expected:
            self.wrong.append(f"verdict {self.verdict}, expected {self.expected}")
        if not (self.named == self.where or (report.not_comparable and self.named.startswith(self.where))):
            self.wrong.append(f"named {self.named or 'nothing'}, expected {self.where or 'nothing'}")
        if first is not None and first.position < spared:
            self.wrong.append(f"position {first.position} differs, where the fault cannot act")

    def judge_fields(self, found: Sequence[str], expected: Sequence[str]) -> None:
        """Hold the contract fields that inference named against the ``expected`` ones."""
        self.fields = list(found)
        if self.fields != list(expected):
            self.wrong.append(f"inference names {', '.join(found) or 'no field'}, not {', '.join(expected)}")

    def to_json(self) -> dict[str, Any]:
        return {
            "fault": self.name,
            "engine": self.engine,
            "expected": [self.expected, self.where],
            "verdict": self.verdict,
            "named": self.named,
            "fields": self.fields,
            "wrong": self.wrong,
            "seconds": round(self.seconds, 2),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """Inverse of `to_json`; the report is not kept."""
        expected, where = data["expected"]
        kept = {name: data[name] for name in ("engine", "verdict", "named", "fields", "wrong", "seconds")}
        return cls(name=data["fault"], expected=expected, where=where, **kept)


def scores(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """(precision, recall): the share of what was blamed that is to blame, and of the faults that were found."""
    blamed = [o for o in outcomes if o.verdict != "equal"]
    faulty = [o for o in outcomes if o.expected != "equal"]
    right = sum(o.found for o in faulty)
    return right / max(1, len(blamed)), right / max(1, len(faulty))
