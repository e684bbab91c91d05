"""How the logprobs that the samples carried agree with those that each side computed, for the verdict."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diffcheck.base.bits import to_float32
from diffcheck.base.recorded import RECORDED, Agreement, RecordedReport, Resolution, agreement, notes_of
from diffcheck.localize.verdict import Verdict
from diffcheck.trace.joined import samples_of
from diffcheck.trace.reader import Trace


def report_recorded(
    left: Trace, right: Trace, recorded: Sequence[Sequence[float] | None] | None = None
) -> RecordedReport | None:
    """The report, or None where no sample carried a record.

    Args:
        left, right: traces of the same samples in one order.
        recorded: per sample of ``left``; default: what the samples of either trace carry.
    """
    records = recorded or _carried(left, right)
    values = np.array([x for r in records for x in r or ()], np.float64)
    if not values.size:
        return None
    report = RecordedReport(
        samples=sum(bool(r) for r in records),
        without=sum(not r for r in records),
        values=int(values.size),
        resolution=Resolution.of(values).name,
        notes=notes_of(records),
    )
    for role, trace in (("rollout", left), ("train", right)):
        if trace.header.engine == RECORDED or "logprobs" not in trace:
            continue
        lengths = [len(s.response_token_ids) for s in samples_of(trace)]
        if [len(r) if r else n for r, n in zip(records, lengths, strict=False)] != lengths:
            # Other samples: what they were compared with is said as a mismatch.
            continue
        computed = to_float32(trace.values("logprobs"), trace.entry("logprobs").dtype)[:, 0].astype(np.float64)
        found, notes = agreement(role, trace.header.engine, records, np.split(computed, np.cumsum(lengths)[:-1]))
        report.agreements.append(found)
        report.notes += [note for note in notes if note not in report.notes]
    return report


def _carried(left: Trace, right: Trace) -> list[tuple[float, ...] | None]:
    ours, theirs = samples_of(left), samples_of(right)
    if len(ours) != len(theirs):
        return [s.recorded_logprobs for s in ours]
    return [
        a.recorded_logprobs or (b.recorded_logprobs if a.token_ids == b.token_ids else None)
        for a, b in zip(ours, theirs, strict=True)
    ]


def judge_record(verdict: Verdict) -> None:
    """Word the verdict on a record: equal as far as it was written down is not equal, and where an operator differs
    cannot be seen in it.
    """
    report = verdict.recorded
    if report is None or verdict.verdict not in ("equal", "diverged") or not report.agreements:
        return
    found = report.agreements[-1]
    computed, stats = f"what {found.engine} computes", found.stats
    if verdict.verdict == "equal":
        verdict.summary = (
            f"All {stats.compared} recorded logprobs have the bits of {computed}. "
            "A record holds nothing else: no other boundary and no weight was compared."
        )
    elif _only_rounded(found, report):
        verdict.verdict = "inconclusive"
        verdict.first_divergence = None
        verdict.summary = (
            f"The {stats.compared} recorded logprobs agree with {computed} as far as they were written down "
            f"({report.resolution}), which is less than all bits: record float32 to know."
        )
    elif verdict.first_divergence is not None:
        first = verdict.first_divergence
        beyond = f", {found.beyond_rounding} of them by more than their rounding ({report.resolution})"
        verdict.summary = (
            f"{stats.mismatch_count} of {stats.compared} recorded logprobs differ from {computed}"
            f"{beyond if Resolution(report.resolution).is_coarse else ''}; the first is of sample {first.sample}, "
            f"position {first.position}. A record cannot show where that arose: roll out the samples with an engine."
        )


def _only_rounded(found: Agreement, report: RecordedReport) -> bool:
    return found.beyond_rounding == 0 and Resolution(report.resolution).is_coarse
