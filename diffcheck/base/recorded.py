"""Logprobs that another system recorded: which numbers can be none, how finely they were written down, and how they
agree with what an engine computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcheck.base.errors import InputError
from diffcheck.base.statistics import LogprobStats

#: Name of a side that is a record, where an engine or a trace folder could stand.
RECORDED = "recorded"
#: Why no other boundary of such a side can be compared.
ONLY_LOGPROBS = "a record holds the logprobs of the drawn tokens and nothing else"
FloatArray = npt.NDArray[np.float64]
#: ln(2^-149): a token of a smaller probability has probability 0 in a float32 softmax, so no sampler draws it.
SMALLEST = -149 * math.log(2)
#: Decimals up to which a record counts as rounded; float32 needs more.
_FEW_DECIMALS = 5
#: One number that often in a row at the end of a record looks like padding.
_RUN = 3
#: How many times better the record must fit the neighbouring tokens before that is said.
_CLEARLY = 4.0


def check_recorded(values: Sequence[float] | None, where: str) -> None:
    """Refuse numbers that are no logprob of a drawn token.

    Args:
        values: natural logarithms, one a response token.
        where: names the list in errors.

    Raises:
        InputError: NaN, infinite, positive, or so small that the token cannot have been drawn; index and count named.
    """
    found = [(i, why) for i, x in enumerate(values or ()) if (why := _fault(x))]
    if found:
        index, why = found[0]
        more = f" ({len(found)} of its {len(values or ())} values are no logprobs)" if len(found) > 1 else ""
        raise InputError(
            f"{where}[{index}] {why}{more}", "give the logprob of the token that was drawn, or omit the field"
        )


def _fault(value: float) -> str:
    if math.isnan(value):
        return "is NaN"
    if math.isinf(value):
        return f"is {value}"
    if value > 0:
        return f"= {value!r} is positive: a logprob is at most 0"
    if value < SMALLEST:
        return f"= {value!r}: a token of that probability is never drawn in float32, so it stands for a missing value"
    return ""


@dataclass(frozen=True)
class Resolution:
    """How finely a record was written down."""

    #: "float32", "float64", "bfloat16", "float16", or "N decimals".
    name: str
    decimals: int | None = None

    @classmethod
    def of(cls, values: FloatArray) -> Resolution:
        """The coarsest format that holds every one of ``values``; decimals only where there are few of them."""
        narrow = values.astype(np.float32)
        if values.size and np.array_equal(narrow.astype(np.float64), values):
            if not (narrow.view(np.uint32) & 0xFFFF).any():
                return cls("bfloat16")
            if np.array_equal(narrow.astype(np.float16).astype(np.float64), values):
                return cls("float16")
        decimals = max((_decimals(x) for x in values.tolist()), default=0)
        if decimals <= _FEW_DECIMALS:
            return cls(f"{decimals} decimals", decimals)
        # Either the float32 itself, or its shortest decimal.
        exact = all(float(x) == v or float(str(x)) == v for x, v in zip(narrow, values.tolist(), strict=True))
        return cls("float32" if exact else "float64")

    @property
    def is_coarse(self) -> bool:
        """Whether float32 results can differ and still be recorded alike."""
        return self.name not in ("float32", "float64")

    def differs(self, recorded: FloatArray, computed: FloatArray) -> npt.NDArray[np.bool_]:
        """[values]: which records ``computed`` (float32 values) would not have been written down as."""
        if self.decimals is not None:
            half = 0.5 * 10.0**-self.decimals
            differs: npt.NDArray[np.bool_] = ~(np.abs(recorded - computed) <= half * (1 + 1e-6))
            return differs
        narrow = computed.astype(np.float32)
        if self.name == "bfloat16":
            bits = narrow.view(np.uint32).astype(np.uint64)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32) << 16
            narrow = rounded.astype(np.uint32).view(np.float32)
        elif self.name == "float16":
            narrow = narrow.astype(np.float16).astype(np.float32)
        unlike: npt.NDArray[np.bool_] = ~(narrow == recorded.astype(np.float32))
        return unlike


def _decimals(value: float) -> int:
    mantissa, _, exponent = repr(value).partition("e")
    return max(0, len(mantissa.partition(".")[2].rstrip("0")) - int(exponent or 0))


@dataclass
class Agreement:
    """A record against the logprobs that one side computed: recorded is left, computed right."""

    side: str
    engine: str
    stats: LogprobStats
    #: Values that differ by more than the record's own rounding.
    beyond_rounding: int
    #: Sample and response index of the largest difference.
    worst: tuple[int, int] | None = None


@dataclass
class RecordedReport:
    """What a run says of the logprobs that its samples carried."""

    samples: int
    without: int
    values: int
    resolution: str
    agreements: list[Agreement] = field(default_factory=list)
    #: What looks wrong with the record itself, in words.
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def agreement(
    side: str, engine: str, recorded: Sequence[Sequence[float] | None], computed: Sequence[FloatArray]
) -> tuple[Agreement, list[str]]:
    """Compare records with one side's logprobs, sample by sample, and say what looks like a fault of the record.

    Args:
        recorded: per sample one number a response token, or None.
        computed: per sample [response tokens], float32 values.
    """
    pairs = [(i, np.asarray(r, np.float64), c) for i, (r, c) in enumerate(zip(recorded, computed, strict=True)) if r]
    theirs, ours = (np.concatenate([part[k] for part in pairs]) if pairs else np.empty(0) for k in (1, 2))
    narrow = theirs.astype(np.float32)
    differs = ~((narrow == ours.astype(np.float32)) | (np.isnan(narrow) & np.isnan(ours)))
    resolution = Resolution.of(theirs)
    beyond = int(resolution.differs(theirs, ours).sum())
    worst = None
    if differs.any():
        gap = np.nan_to_num(np.abs(theirs - ours), nan=np.inf)
        places = np.array([(i, j) for i, r, _ in pairs for j in range(r.size)])
        sample, index = places[int(np.argmax(gap))]
        worst = (int(sample), int(index))
    stats = LogprobStats.of(narrow.astype(np.float64), ours, int(differs.sum()))
    return Agreement(side, engine, stats, beyond, worst), [*_padding(pairs), *_shift(pairs)]


def notes_of(recorded: Sequence[Sequence[float] | None]) -> list[str]:
    """What can be said of a record without computing anything."""
    notes = []
    zeros = [(i, sum(x == 0 for x in r)) for i, r in enumerate(recorded) if r]
    if count := sum(n for _, n in zeros):
        where = ", ".join(str(i) for i, n in zeros if n)
        notes.append(f"{count} recorded logprobs are exactly 0 (samples {where}): probability 1, or padding")
    for i, r in enumerate(recorded):
        if r and (run := _run_at_end(r)) >= _RUN and r[-1] != 0:
            notes.append(f"sample {i}: its last {run} recorded logprobs are all {r[-1]!r}, which looks like padding")
    return notes


def _run_at_end(values: Sequence[float]) -> int:
    return next((n for n, x in enumerate(reversed(values)) if x != values[-1]), len(values))


def _padding(pairs: Sequence[tuple[int, FloatArray, FloatArray]]) -> list[str]:
    found = [(i, int(((r == 0) & (c < -1e-4)).sum())) for i, r, c in pairs]
    count = sum(n for _, n in found)
    if not count:
        return []
    where = ", ".join(str(i) for i, n in found if n)
    return [f"{count} recorded logprobs are 0 where the engine computes less (samples {where}): padding, not logprobs"]


def _shift(pairs: Sequence[tuple[int, FloatArray, FloatArray]]) -> list[str]:
    """Whether the record fits the neighbouring tokens much better than its own."""

    def apart(shift: int) -> float:
        parts = [
            np.abs(r[max(0, shift) : r.size + min(0, shift)] - c[max(0, -shift) : c.size + min(0, -shift)])
            for _, r, c in pairs
            if r.size > abs(shift)
        ]
        every = np.concatenate(parts) if parts else np.empty(0)
        return float(every.mean()) if every.size >= _RUN else math.inf

    own = apart(0)
    for shift, word in ((1, "previous"), (-1, "next")):
        theirs = apart(shift)
        if own > 0 and theirs * _CLEARLY < own:
            return [
                f"the record fits the logprobs of the {word} token better (mean |Δ| {theirs:.3g} against {own:.3g} "
                "nats): it is moved by one token"
            ]
    return []
