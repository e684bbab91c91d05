"""The verdict: what the comparison found, as data, with everything it did not see."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from diffcheck.base.errors import ExitCode
from diffcheck.base.recorded import RecordedReport
from diffcheck.base.statistics import LogprobStats
from diffcheck.localize.preflight import Mismatch
from diffcheck.localize.routing import LayerRouting

Kind = Literal["equal", "diverged", "not_comparable", "inconclusive"]
#: equal: no bit differs. origin: rows differ although all their inputs are equal. receiver: it differs, with inputs
#: that differ already. unobserved: at least one side has no values.
Status = Literal["equal", "origin", "receiver", "unobserved"]

_EXIT = {
    "equal": ExitCode.EQUAL,
    "diverged": ExitCode.DIVERGED,
    "not_comparable": ExitCode.NOT_COMPARABLE,
    "inconclusive": ExitCode.INCONCLUSIVE,
}


@dataclass
class BoundaryResult:
    """One boundary. ``elements`` counts what was compared; statistics are None where only digests were."""

    name: str
    status: Status
    elements: int = 0
    differing: int | None = 0
    max_abs: float | None = 0.0
    max_ulp: int | None = 0
    #: Rows that differ, and rows that differ although their inputs are equal.
    rows_differing: int = 0
    rows_origin: int = 0
    #: dtype on each side, where they differ or for the reader's interest.
    dtypes: tuple[str, str] | None = None
    #: Why unobserved.
    reason: str = ""


@dataclass
class FirstDivergence:
    """The first boundary whose inputs are equal in bits and whose output is not."""

    boundary: str
    sample: int
    position: int
    role: str
    elements: int
    differing: int | None
    max_abs: float | None
    max_ulp: int | None
    #: Element within the row; None where only digests were compared. left and right are its values, with their bit
    #: patterns.
    index: int | None
    left: float | None
    right: float | None
    left_bits: str | None = None
    right_bits: str | None = None
    #: Boundaries among which the divergence arose: unobserved ones between the last equal boundary and this, then this
    #: one.
    interval: list[str] = field(default_factory=list)
    #: Boundaries earlier in the graph that were compared and found equal, and the elements in them.
    equal_before: int = 0
    equal_elements_before: int = 0
    rows_origin: int = 0
    rows: int = 0
    dtypes: tuple[str, str] | None = None
    #: Elements by distance: equal ones, then those with 2^(k-1) <= ulp < 2^k for k = 1, 2, ... None with digests only.
    ulp_histogram: list[int] | None = None


@dataclass
class Coverage:
    """How much of the graph was seen on both sides."""

    observed: int
    expected: int
    #: boundary -> reason.
    unobserved: dict[str, str] = field(default_factory=dict)


@dataclass(repr=False)
class Verdict:
    """Everything ``--json`` holds."""

    verdict: Kind
    #: One sentence for a person.
    summary: str
    not_comparable: list[Mismatch] = field(default_factory=list)
    first_divergence: FirstDivergence | None = None
    boundaries: list[BoundaryResult] = field(default_factory=list)
    coverage: Coverage = field(default_factory=lambda: Coverage(0, 0))
    logprobs: LogprobStats | None = None
    #: The same of the prompts' tokens where both engines return them; else ``prompts_not_compared`` says why not.
    prompt_logprobs: LogprobStats | None = None
    prompts_not_compared: str = ""
    #: How what the samples' file carried agrees with what each side computed; None where it carried nothing.
    recorded: RecordedReport | None = None
    #: What a reader must know before anything else, one sentence each.
    notes: list[str] = field(default_factory=list)
    #: Agreement of two routers by layer; empty for a dense model.
    routing: list[LayerRouting] = field(default_factory=list)
    ablation: list[dict[str, Any]] = field(default_factory=list)
    contracts: dict[str, Any] = field(default_factory=lambda: {"left": [], "right": [], "differs_in": []})
    #: left and right: engine, versions, topology, dtype, phase, evidence, deliberate changes.
    evidence: dict[str, Any] = field(default_factory=dict)
    schema: int = 1

    @property
    def exit_code(self) -> ExitCode:
        return _EXIT[self.verdict]

    def __repr__(self) -> str:
        return f"<Verdict {self.verdict}: {self.summary}>"

    def _repr_html_(self) -> str:
        """For notebooks: the headline; `diffcheck.report.html.write_report` makes the page."""
        return f"<p><strong>{self.verdict.replace('_', ' ').upper()}</strong> {html.escape(self.summary)}</p>"

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["coverage"]["reasons"] = data["coverage"]["unobserved"]
        data["coverage"]["unobserved"] = list(data["coverage"]["unobserved"])
        return _finite(data)  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    """JSON has no infinities or NaN: they become strings, so that any parser reads the file."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value
