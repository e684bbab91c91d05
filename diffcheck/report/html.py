"""A verdict as one self-contained HTML page: what ``--html`` writes.

Everything on it is data of the verdict and of the two traces. What the traces do not hold is said in its place.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from markupsafe import Markup

from diffcheck.base.progress import Progress, silent
from diffcheck.infer.report import side_lines, why
from diffcheck.localize import graph_of
from diffcheck.localize.verdict import BoundaryResult, FirstDivergence, Verdict
from diffcheck.report import ablation, dataflow, figures
from diffcheck.report.charts import svg, tag
from diffcheck.report.folding import (
    by_reason,
    equal_before,
    folded,
    interval_in_short,
    record_in_words,
    share,
    short_count,
    side_in_words,
    span_of,
    worst_in_words,
)
from diffcheck.report.measure import Measured, measure
from diffcheck.report.page import Row, both_shortened, both_widths, breakable, brief, write_page
from diffcheck.trace.reader import Trace
from diffcheck.trace.roles import side_names
from diffcheck.trace.schema import HEADER
from reference.contract import CONTRACTS, fields

#: Width of the graph beside other things on a desktop.
_GRAPH = 430
#: Values of an open field that are listed.
_SHOWN = 4
_STATUSES = {
    "equal": "no bit differs",
    "origin": "differs although all its inputs are equal: here a difference arises",
    "receiver": "differs, and so do its inputs: it passes on what it got",
    "unobserved": "not seen on both sides",
}


def write_report(path: Path, verdict: Verdict, left: Trace, right: Trace, progress: Progress = silent) -> None:
    """Write the page of ``verdict``, atomically.

    Args:
        left, right: the traces that it was made from.

    Raises:
        InputError: ``path`` cannot be written.
        TraceError: a trace turns out to be damaged.
    """
    measured = measure(verdict, left, right, progress)
    write_page(path, "verdict.html.j2", **_values(verdict, measured, left, right))


def _values(verdict: Verdict, measured: Measured, left: Trace, right: Trace) -> dict[str, Any]:
    """What the template ``verdict.html.j2`` uses."""
    engines = list(side_names(left.header.engine, right.header.engine))
    nodes = graph_of(left.header, right.header) if verdict.boundaries else []
    results = verdict.boundaries
    classes = figures.classes_in_use(measured.histograms)
    first = verdict.first_divergence
    return {
        "title": f"{' against '.join(engines)}: {verdict.verdict.replace('_', ' ')}",
        "verdict": verdict,
        "engines": engines,
        "sides": list(_sides(verdict)),
        "record": record_in_words(verdict.recorded) if verdict.recorded else "",
        "agreements": [(a, worst_in_words(a)) for a in verdict.recorded.agreements] if verdict.recorded else [],
        "statuses": [(_sign(status), status, words) for status, words in _STATUSES.items()],
        "mismatches": [Row([m.field, *both_shortened(str(m.left), str(m.right))]) for m in verdict.not_comparable],
        **_contracts(verdict.contracts),
        "graph": both_widths(lambda w: dataflow.draw(nodes, results, w), _GRAPH) if nodes else "",
        "map": both_widths(lambda w: figures.status_map(results, w), _GRAPH) if nodes else "",
        "first": list(_first(first)) if first else [],
        "histogram": figures.ulp_histogram(first.ulp_histogram) if first and first.ulp_histogram else "",
        "boundary_rows": [_boundary(group, measured, classes) for group in folded(results)],
        "every_boundary": [_boundary([r], measured, classes) for r in results],
        "finer": _finer(results),
        "positions": figures.position_map(measured),
        "tokens": figures.token_plot(measured.tokens) if measured.tokens and measured.tokens.left.size else "",
        "ablations": [ablation.section(data) for data in verdict.ablation],
        "unobserved": [
            Row([f"{len(names)}", ", ".join(names), reason])
            for reason, names in by_reason(verdict.coverage.unobserved).items()
        ],
        "evidence": list(_evidence(verdict, left, right)),
        "seconds": verdict.evidence.get("seconds", {}),
        "written": f"rlk {version('rlk')}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC",
    }


def _sides(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """(role, what ran) for the head of the page, deliberate changes named."""
    for role, side in (("rollout", "left"), ("train", "right")):
        if side in verdict.evidence:
            ran = verdict.evidence[side]
            yield role, side_in_words(ran)
            for change in ran["changed"]:
                yield "", f"changed on purpose: {change}"
            for warning in ran.get("warnings", ()):
                yield "", f"warning: {warning}"


def _sign(status: str) -> Markup:
    return svg(16, 14, status, figures.status_mark(status, 8, 7, 12))


def _first(first: FirstDivergence) -> Iterator[tuple[str, object]]:
    """Terms and descriptions of the first divergence."""
    if first.role == "interval":
        yield "arose in one of", tag("code", breakable(interval_in_short(first)))
        yield "", "all but the last were not observed on both sides"
    else:
        yield "boundary", tag("code", breakable(first.boundary))
    element = "" if first.index is None else f", element {first.index:,}"
    yield "first at", f"sample {first.sample}, position {first.position}{element}"
    if first.left is not None:
        pair = [tag("code", f"{v!r} ({bits})") for v, bits in zip(*_values_of(first), strict=True)]
        yield "values", Markup("{} against {}").format(*pair)
    if first.differing is not None:
        part = 100 * first.differing / max(1, first.elements)
        yield "how many", f"{first.differing:,} of {first.elements:,} elements ({part:.3g} %)"
        yield "how far", f"at most {brief(first.max_abs)}, at most {short_count(first.max_ulp or 0)} ulp"
    yield "rows", f"{first.rows_origin:,} of {first.rows:,} differ although all their inputs are equal"
    yield "equal before", equal_before(first)
    if first.dtypes and first.dtypes[0] != first.dtypes[1]:
        yield "dtypes", " against ".join(first.dtypes)


def _finer(results: Sequence[BoundaryResult]) -> str:
    """Which boundaries count their ulp in float32, where others do in a narrower format."""
    narrow = {r.dtypes[0] for r in results if r.dtypes and r.dtypes[0] == r.dtypes[1]} - {"float32"}
    names = [r.name for r in results if r.status in ("origin", "receiver") and r.dtypes and "float32" in r.dtypes]
    if not narrow or not names:
        return ""
    return f"Of {', '.join(names)} the ulp are float32's, much finer than {' and '.join(sorted(narrow))}'s."


def _values_of(first: FirstDivergence) -> tuple[tuple[float | None, ...], tuple[str | None, ...]]:
    return (first.left, first.right), (first.left_bits, first.right_bits)


def _boundary(group: Sequence[BoundaryResult], measured: Measured, classes: int) -> Row:
    """A row of the table of boundaries: one boundary, or neighbours of one status."""
    status = group[0].status
    name = group[0].name if len(group) == 1 else span_of([r.name for r in group])
    label = Markup("{} {}").format(_sign(status), status if len(group) == 1 else f"{len(group)} {status}")
    if status in ("equal", "unobserved"):
        return Row([name, label, "", "", "", ""], status)
    ulp = [r.max_ulp for r in group if r.max_ulp is not None]
    apart = [r.max_abs for r in group if r.max_abs is not None]
    found = [measured.histograms[r.name] for r in group if r.name in measured.histograms]
    small = figures.sparkline(found, classes) if found else tag("span", "digests only", class_="muted")
    sizes = brief(max(apart)) if apart else "–", short_count(max(ulp)) if ulp else "–"
    return Row([name, label, share(_joined(group)), *sizes, small], status)


def _joined(group: Sequence[BoundaryResult]) -> BoundaryResult:
    """The elements of a group as if they were one boundary's."""
    counts = [r.differing for r in group]
    return BoundaryResult(
        group[0].name,
        group[0].status,
        elements=sum(r.elements for r in group),
        differing=None if None in counts else sum(c or 0 for c in counts),
        rows_differing=sum(r.rows_differing for r in group),
    )


def _contracts(contracts: Mapping[str, Any]) -> dict[str, Any]:
    """The two contracts: sentences, how sure they are, and the fields side by side."""
    sides = [contracts[side][0] for side in ("left", "right") if contracts[side]]
    if not sides:
        return {"why": [], "answers": [], "contract_rows": [], "operator": ""}
    left, right = sides
    differs = {d["field"]: d for d in contracts["differs_in"]}
    return {
        "why": [d["sentence"] for d in contracts["differs_in"]] or why(left, right, []),
        "answers": [[line.plain.strip() for line in side_lines(side)] for side in sides],
        "contract_rows": list(_fields(left, right, differs)) if left["contract"] or right["contract"] else [],
        "operator": left["operator"],
    }


def _fields(left: Mapping[str, Any], right: Mapping[str, Any], differs: Mapping[str, Any]) -> Iterator[Row]:
    """Each field of the operator's contract as the two sides have it, those that differ first."""
    known = fields(CONTRACTS[left["operator"]])
    for path in sorted(known, key=lambda p: p not in differs):
        if path in differs:
            values = [Markup("<strong>{}</strong>").format(str(differs[path][side])) for side in ("left", "right")]
            yield Row([Markup("<strong>≠</strong>"), path, *values], "origin")
        else:
            yield Row(["", path, _value(left, path), _value(right, path)])


def _value(answer: Mapping[str, Any], path: str) -> object:
    """A field of one side's answer: decided, open, or that of the nearest contract."""
    if path in answer["decided"]:
        return str(answer["decided"][path])
    for u in answer["undecided"]:
        if u["field"] == path:
            shown = ", ".join(str(v) for v in u["values"][:_SHOWN])
            more = f" and {len(u['values']) - _SHOWN} more" if len(u["values"]) > _SHOWN else ""
            return tag("span", f"open: {shown}{more}", class_="muted", title=u["reason"])
    group, _, name = path.partition(".")
    value = (answer["contract"] or {}).get(group, {}).get(name, "–")
    note = "" if answer["fits"] else " (nearest)"
    return tag("span", f"{value}{note}", class_="muted")


def _evidence(verdict: Verdict, left: Trace, right: Trace) -> Iterator[tuple[str, list[Row]]]:
    """(engine, what really ran) of each side, nested fields dotted."""
    names = side_names(left.header.engine, right.header.engine)
    for side, name, trace in (("left", names[0], left), ("right", names[1], right)):
        ran = verdict.evidence[side]
        rows = [("trace level", ran["level"]), *_flat("", {"versions": ran["versions"], **ran["evidence"]})]
        digest = hashlib.sha256((trace.folder / HEADER).read_bytes()).hexdigest()
        yield name, [Row([term, value]) for term, value in (*rows, (f"sha256 of {HEADER}", digest))]
    yield "what repeats it", [Row([term, value]) for term, value in _flat("", verdict.evidence["repeat"])]


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)
