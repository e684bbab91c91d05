"""What ablation answers, as data: the operators that part the two sides, what each is worth, and what is left.

``verdict.ablation`` holds one `Ablation` as JSON for each side that was changed (today: one).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from diffcheck.base.statistics import LogprobStats

#: explained: with the minimal set aligned, every logprob is equal in bits. remainder: with everything aligned that can
#: be, some logprobs still differ. inconclusive: a side does not repeat itself, a substitution did not take place, or
#: the run was interrupted before the logprobs were explained; ``reason`` says which.
Status = Literal["explained", "remainder", "inconclusive"]
#: engine: the engine whose operator it is recomputed it on the same inputs and gave the same bits. contract: that
#: engine was not live; a contract that gives all its traced bits stands for it. inputs: every input was equal to the
#: traced one, so the traced output is the operator's. unproven: none of these held for all rows.
Evidence = Literal["engine", "contract", "inputs", "unproven"]


@dataclass(frozen=True)
class Removed:
    """How much of the logprob mismatch is gone, as shares of the baseline: 1 all of it, 0 nothing, below 0 it grew."""

    count: float
    max: float
    mean: float

    @classmethod
    def of(cls, baseline: LogprobStats, now: LogprobStats) -> Removed:
        def share(before: float, after: float) -> float:
            return 1.0 - after / before if before else 0.0

        return cls(
            share(baseline.mismatch_count, now.mismatch_count),
            share(baseline.max_abs_diff, now.max_abs_diff),
            share(baseline.mean_abs_diff, now.mean_abs_diff),
        )


@dataclass
class Trial:
    """One forward in which some units follow the donor and all others the host."""

    #: Names of the units that were aligned.
    aligned: list[str]
    #: The logprobs of this forward against the donor's.
    logprobs: LogprobStats
    removed: Removed
    evidence: Evidence
    #: Engine whose live forward was changed: the host's, or the donor's with the other units taken from the host.
    engine: str
    #: Engine runs that the trial took.
    runs: int
    #: Why it is unproven.
    note: str = ""
    #: The one boundary that was left out where the whole unit would be too deep.
    place: str = ""
    #: Boundaries besides the origins at which the two sides differ on this forward's inputs.
    elsewhere: list[str] = field(default_factory=list)


@dataclass
class Unit:
    """An operator whose outputs differ although its inputs are equal, in one layer or over all layers."""

    #: ``layers.*.input_layernorm``, or the boundary itself where there is one.
    name: str
    operator: str
    #: Its boundaries that differ on equal inputs, in dataflow order.
    boundaries: list[str]
    #: Boundaries among which its difference arises: more than one where some before it were not observed on both sides.
    interval: list[str]
    #: What the host's operator gives on the donor's inputs, against what the donor's gave.
    elements: int
    differing: int
    max_abs: float
    max_ulp: int
    #: Profile, or "inferred", whose contract gives all bits of the donor's (host's) operator; empty: none is known.
    donor_contract: str = ""
    host_contract: str = ""
    #: Only this unit aligned; None where it was not run, or would take more turns of the engines than are allowed.
    alone: Trial | None = None
    #: Every unit aligned but this one or, where that is too deep, but one place of it.
    left_out: Trial | None = None
    in_minimal: bool = False
    #: As in ``verdict.contracts.differs_in``: boundary, field, left, right, sentence. Only with inference.
    differs_in: list[dict[str, Any]] = field(default_factory=list)
    #: Why ``differs_in`` is empty, or not sure, where it was asked for.
    unexplained: str = ""


@dataclass
class Pair:
    """Two units aligned together, against what they remove alone (shares of the mean)."""

    units: tuple[str, str]
    alone: tuple[float, float]
    trial: Trial


@dataclass
class Origin:
    """One independent origin in dataflow order: with all earlier ones aligned, the sides first differ here."""

    boundary: str
    unit: str
    #: Boundaries among which it arose: more than one where some were not observed.
    interval: list[str]
    sample: int
    position: int
    elements: int
    differing: int
    max_abs: float
    max_ulp: int
    #: Logprobs with this origin and all earlier ones aligned; None where the plan did not run this step.
    after: LogprobStats | None = None
    #: Share of the baseline's mean that this step removed since the last step that was run; below 0: it grew.
    explained: float | None = None
    #: Whether the first divergence of that forward was seen to be the next origin of the list (or none).
    confirmed: bool | None = None


@dataclass
class Ablation:
    """Everything that one ablation found."""

    #: Engines: the donor's operators are put into the host's forward.
    host: str
    donor: str
    #: "train" or "rollout".
    host_side: str
    baseline: LogprobStats
    status: Status = "inconclusive"
    #: One sentence for a person.
    summary: str = ""
    #: What keeps the answer from being whole; empty if nothing does.
    reason: str = ""
    #: Whether an engine did not take what was put in: then nothing follows from its forwards.
    void: bool = False
    #: What was going to be run, printed before it ran.
    plan: list[str] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    #: Units whose alignment makes every logprob equal, and whether dropping any one was seen to leave a mismatch.
    minimal: list[str] = field(default_factory=list)
    minimal_verified: bool = False
    #: The forward with the minimal set aligned (``all`` where it is all of them).
    together: Trial | None = None
    pairs: list[Pair] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    #: First and last origin on which the logprobs depend, found by bisection.
    bracket: list[str] = field(default_factory=list)
    #: boundary -> why it could not be aligned.
    unaligned: dict[str, str] = field(default_factory=dict)
    #: Forwards by side ("rollout", "train").
    runs: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sides_in_words(host: str, donor: str, host_side: str) -> tuple[str, str]:
    """What to call the host and the donor: their engines or, where these are the same, their sides."""
    if host != donor:
        return host, donor
    words = "the train side", "the rollout side"
    return words if host_side == "train" else (words[1], words[0])
