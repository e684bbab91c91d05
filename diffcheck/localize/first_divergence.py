"""Localise: compare two traces boundary by boundary and name the first whose inputs are equal and whose output is not.

Equality is decided row by row over the dataflow graph. A row of a boundary is an ORIGIN when it differs although every
row it is computed from is equal; a RECEIVER when it differs and some input row does already. Attention reads the keys
and values of all earlier positions of its sample, so there an input differs as soon as one of them does. Where inputs
were not observed on both sides, the question passes to their own inputs, and the answer is an interval of boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from diffcheck.base.bits import BoolArray, UIntArray, compare, to_float32
from diffcheck.base.boundaries import Boundary, graph
from diffcheck.base.progress import Progress, silent
from diffcheck.base.recorded import RECORDED
from diffcheck.base.samples import Sample
from diffcheck.base.statistics import LogprobStats
from diffcheck.localize.alignment import misaligned
from diffcheck.localize.compare import Compared, compare_boundary, histogram, why_unobserved
from diffcheck.localize.live_cause import live_causes
from diffcheck.localize.preflight import Mismatch, compare_objects, compare_versions
from diffcheck.localize.prompts import compare_prompts
from diffcheck.localize.recorded import judge_record, report_recorded
from diffcheck.localize.repeat import processor_notes, repeat_of
from diffcheck.localize.routing import in_words, routing
from diffcheck.localize.verdict import BoundaryResult, Coverage, FirstDivergence, Kind, Status, Verdict
from diffcheck.rows import Index, Rows, expected_rows
from diffcheck.trace.joined import JoinedTrace, join, partners, samples_of
from diffcheck.trace.reader import Trace
from diffcheck.trace.roles import side_names
from diffcheck.trace.schema import Header
from reference.models.config import ModelConfig


def localize(
    left: Trace,
    right: Trace,
    progress: Progress = silent,
    *,
    recorded: Sequence[Sequence[float] | None] | None = None,
) -> Verdict:
    """Compare two traces. ``left`` is the rollout side. The same samples in another order are compared as the same.

    Memory stays bounded: values are streamed in blocks of rows.

    Args:
        recorded: per sample of ``left`` the logprobs that another system recorded, or None; default: what the traces'
            samples carry.

    Raises:
        TraceError: a trace turns out to be damaged; file and boundary are named.
    """
    right = join(left, right)
    verdict = _localize(left, right, progress)
    if isinstance(right, JoinedTrace):
        verdict.notes.append("The two sides hold the same samples in another order; they were joined by what they are.")
    for role, trace in (("rollout", left), ("train", right)):
        if quantised := quantisation(trace.header.evidence):
            verdict.notes.insert(0, f"The {role} side is quantised: {quantised}.")
            if verdict.verdict == "not_comparable":
                verdict.summary = f"The {role} side is quantised ({quantised}). {verdict.summary}"
    verdict.notes += processor_notes(left.header, right.header)
    compare_prompts(verdict, left, right)
    verdict.recorded = report_recorded(left, right, recorded)
    if verdict.recorded is not None:
        verdict.notes += [f"{note[0].upper()}{note[1:]}." for note in verdict.recorded.notes]
        if left.header.engine == RECORDED:
            judge_record(verdict)
    return verdict


def _localize(left: Trace, right: Trace, progress: Progress) -> Verdict:
    evidence = {"left": _side(left), "right": _side(right), "repeat": repeat_of(left.header, right.header)}
    samples, theirs = samples_of(left), samples_of(right)
    mismatches = _unpaired(samples, theirs) or [
        *compare_versions(left.header.object, right.header.object, samples, theirs),
        *compare_objects(left.header.object, right.header.object),
    ]
    if mismatches:
        first = mismatches[0]
        return Verdict(
            "not_comparable",
            f"The two sides did not compute the same object: {first.field} differs. No kernel is to blame.",
            not_comparable=mismatches,
            evidence=dict(evidence),
        )
    nodes = graph_of(left.header, right.header)
    rows = expected_rows(samples)
    compared: dict[str, Compared] = {}
    reasons: dict[str, str] = {}
    for done, node in enumerate(nodes):
        progress("comparing", done, len(nodes))
        reason = why_unobserved(node, left, right)
        if reason:
            reasons[node.name] = reason
        else:
            compared[node.name] = compare_boundary(node, left, right, len(rows[node.rows]))
    progress("comparing", len(nodes), len(nodes))
    verdict = _judge(nodes, rows, compared, reasons, left, right, evidence)
    verdict.routing = routing(nodes, left, right)
    verdict.notes += in_words(verdict.routing)
    origin = verdict.first_divergence
    if origin is not None and origin.boundary == "logprobs" and (shifted := misaligned(samples, left, right)):
        verdict.verdict, verdict.not_comparable, verdict.first_divergence = "not_comparable", [shifted], None
        verdict.summary = f"Both sides computed the same logprobs, but on the right every token has {shifted.right}."
    verdict.notes += live_causes(verdict.first_divergence, left.header, right.header)
    return verdict


def quantisation(evidence: Mapping[str, Any]) -> str:
    """What the live engine held quantised, by what it says of its own operators and cache; empty where nothing."""
    found = []
    linear = str(evidence.get("operators", {}).get("linear", ""))
    if ".quantization." in linear:
        found.append(f"weights in {linear.split('.quantization.')[1].split('.')[0]} ({linear.rpartition('.')[2]})")
    cache = str(evidence.get("kv_cache_dtype", ""))
    if any(word in cache for word in ("fp8", "int8", "int4", "nvfp4")):
        found.append(f"KV cache in {cache}")
    return ", ".join(found)


def _unpaired(left: Sequence[Sample], right: Sequence[Sample]) -> list[Mismatch]:
    """The mismatch, if the sides do not hold as many samples: which one has no partner."""
    if len(left) == len(right):
        return []

    def described(ours: Sequence[Sample], others: Sequence[Sample]) -> str:
        found = partners(ours, others)
        alone = next((i for i, j in enumerate(found) if j is None), None)
        if alone is None:
            return f"{len(ours)}"
        s = ours[alone]
        name = f"id {s.id!r}" if s.id is not None else f"tokens {', '.join(map(str, s.token_ids[:6]))}, ..."
        return f"{len(ours)}; sample {alone} ({name}) is only here"

    return [Mismatch("samples", described(left, right), described(right, left))]


def _side(trace: Trace) -> dict[str, object]:
    keep = ("engine", "versions", "tensor_parallel", "dtype", "phase", "level", "evidence", "changed")
    return {k: v for k, v in asdict(trace.header).items() if k in keep} | {"warnings": trace.warnings}


def graph_of(left: Header, right: Header) -> list[Boundary]:
    """The boundaries that two traces are compared at, in topological order."""
    known = [header for header in (left, right) if header.object.model]
    if not known:
        return [Boundary("logprobs", "logprob", (), 1, rows="response")]
    same = len({header.tensor_parallel for header in known}) == 1
    return graph(ModelConfig(**known[0].object.model), known[0].tensor_parallel if same else 1)


class _Flow:
    """Row-wise propagation of "some input differs" along the graph, through unobserved boundaries."""

    def __init__(self, nodes: Sequence[Boundary], rows: dict[str, Rows], compared: dict[str, Compared]) -> None:
        self._nodes = {n.name: n for n in nodes}
        self._rows = rows
        self._compared = compared
        self._suspect: dict[str, BoolArray] = {}
        self._response_in_all = Index(rows["all"]).find(rows["response"])

    def inputs_differ(self, node: Boundary) -> BoolArray:
        """[rows of node]: whether any observed value a row depends on, directly or through unobserved boundaries,
        differs.
        """
        out = np.zeros(len(self._rows[node.rows]), np.bool_)
        for name in (*node.inputs, *node.fused_inputs):
            source = self._nodes[name]
            differs = self._differs(source)
            if name in node.history_inputs:
                differs = self._or_earlier(differs)
            if source.rows == "all" and node.rows == "response":
                differs = differs[self._response_in_all]
            out |= differs
        return out

    def interval(self, node: Boundary) -> list[str]:
        """``node`` with the unobserved boundaries right before it, in topological order: where its divergence may have
        arisen.
        """
        found: set[str] = set()
        frontier = list(node.inputs)
        while frontier:
            name = frontier.pop()
            if name not in self._compared and name not in found:
                found.add(name)
                frontier += self._nodes[name].inputs
        return [n for n in self._nodes if n in found] + [node.name]

    def _differs(self, node: Boundary) -> BoolArray:
        if node.name in self._compared:
            return self._compared[node.name].rows
        if node.name not in self._suspect:
            self._suspect[node.name] = self.inputs_differ(node)
        return self._suspect[node.name]

    def _or_earlier(self, differs: BoolArray) -> BoolArray:
        """Running OR over the positions of each sample (rows are ordered by sample, then position)."""
        sample = self._rows["all"].sample
        out = differs.copy()
        for i in np.unique(sample):
            of_sample = sample == i
            out[of_sample] = np.logical_or.accumulate(differs[of_sample])
        return out


def _judge(
    nodes: list[Boundary],
    rows: dict[str, Rows],
    compared: dict[str, Compared],
    reasons: dict[str, str],
    left: Trace,
    right: Trace,
    evidence: Mapping[str, object],
) -> Verdict:
    flow = _Flow(nodes, rows, compared)
    results, first = [], None
    equal_before = equal_elements = 0
    for node in nodes:
        found = compared.get(node.name)
        if found is None:
            results.append(BoundaryResult(node.name, "unobserved", reason=reasons[node.name]))
            continue
        result, origin = _classify(node, found, flow)
        results.append(result)
        if result.status == "equal":
            equal_before += first is None
            equal_elements += found.elements if first is None else 0
        elif result.status == "origin" and first is None:
            first = _first(node, found, origin, rows[node.rows], flow, left, right)
            first.equal_before, first.equal_elements_before = equal_before, equal_elements
    coverage = Coverage(len(compared), len(nodes), reasons)
    logprobs = _logprobs(compared.get("logprobs"), left, right)
    verdict, summary = _conclude(first, coverage, logprobs, left.header, right.header)
    return Verdict(
        verdict,
        summary,
        first_divergence=first,
        boundaries=results,
        coverage=coverage,
        logprobs=logprobs,
        evidence=dict(evidence),
    )


def _classify(node: Boundary, found: Compared, flow: _Flow) -> tuple[BoundaryResult, BoolArray]:
    origin = found.rows & ~flow.inputs_differ(node)
    status: Status = "equal" if not found.rows.any() else "origin" if origin.any() else "receiver"
    d = found.difference
    # Digests can see a difference in rows whose patterns were not stored: then the statistics of the stored rows would
    # mislead.
    known = d is not None and (status == "equal" or d.differing > 0)
    result = BoundaryResult(
        node.name,
        status,
        elements=found.elements,
        differing=d.differing if known and d else None if status != "equal" else 0,
        max_abs=d.max_abs if known and d else None if status != "equal" else 0.0,
        max_ulp=d.max_ulp if known and d else None if status != "equal" else 0,
        rows_differing=int(found.rows.sum()),
        rows_origin=int(origin.sum()),
        dtypes=found.dtypes,
    )
    return result, origin


def _first(
    node: Boundary, found: Compared, origin: BoolArray, rows: Rows, flow: _Flow, left: Trace, right: Trace
) -> FirstDivergence:
    row = int(np.flatnonzero(origin)[0])
    d = found.difference
    interval = flow.interval(node)
    first = FirstDivergence(
        boundary=node.name,
        sample=int(rows.sample[row]),
        position=int(rows.position[row]),
        role="origin" if len(interval) == 1 else "interval",
        elements=found.elements,
        differing=d.differing if d else None,
        max_abs=d.max_abs if d else None,
        max_ulp=d.max_ulp if d else None,
        index=None,
        left=None,
        right=None,
        interval=interval,
        rows_origin=int(origin.sum()),
        rows=len(rows),
        dtypes=found.dtypes,
    )
    pair = _stored_pair(node.name, row, left, right)
    if pair is not None:
        x, y = pair
        index = compare(x, found.dtypes[0], y, found.dtypes[1]).first
        first.index = index
        first.left = float(to_float32(x[0, index : index + 1], found.dtypes[0])[0])
        first.right = float(to_float32(y[0, index : index + 1], found.dtypes[1])[0])
        first.left_bits, first.right_bits = _hex(x[0, index]), _hex(y[0, index])
    if (counted := histogram(node.name, left, right)) is not None:
        first.ulp_histogram = counted.used.tolist()
    return first


def _stored_pair(name: str, row: int, left: Trace, right: Trace) -> tuple[UIntArray, UIntArray] | None:
    a, b = left.row(name, row), right.row(name, row)
    return None if a is None or b is None else (a, b)


def _hex(value: np.unsignedinteger) -> str:
    return f"0x{int(value):0{2 * value.itemsize}x}"


def _logprobs(found: Compared | None, left: Trace, right: Trace) -> LogprobStats | None:
    if found is None:
        return None
    a = to_float32(left.values("logprobs"), left.entry("logprobs").dtype)[:, 0].astype(np.float64)
    b = to_float32(right.values("logprobs"), right.entry("logprobs").dtype)[:, 0].astype(np.float64)
    return LogprobStats.of(a, b, int(found.rows.sum()))


def _conclude(
    first: FirstDivergence | None, coverage: Coverage, logprobs: LogprobStats | None, left: Header, right: Header
) -> tuple[Kind, str]:
    pair = " and ".join(side_names(left.engine, right.engine))
    if first is not None:
        where = f"{first.boundary} (sample {first.sample}, position {first.position})"
        if first.role == "interval":
            inside = ", ".join(first.interval[:-1])
            return "diverged", f"{pair} diverge no later than {where}; not observed just before it: {inside}."
        return "diverged", f"{pair} computed the same object and first diverge at {where}."
    if not coverage.observed or logprobs is None or not logprobs.compared:
        what = "No logprob" if coverage.observed else "No boundary"
        return "inconclusive", f"{what} was compared between {pair}, so nothing can be said about equality."
    count = len(coverage.unobserved)
    unseen = f"; {count} {'boundary was' if count == 1 else 'boundaries were'} not observed" if count else ""
    return "equal", (
        f"{pair} agree in every bit of {coverage.observed} boundaries and {logprobs.compared} logprobs{unseen}."
    )
