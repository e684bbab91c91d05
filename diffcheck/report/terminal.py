"""The verdict for a person at a terminal: verdict first, then the divergence, then the table, then what was not
seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from diffcheck.ablate.report import print_ablation
from diffcheck.base.recorded import RecordedReport
from diffcheck.base.statistics import LogprobStats
from diffcheck.infer.report import print_contracts
from diffcheck.localize.routing import LayerRouting
from diffcheck.localize.verdict import BoundaryResult, FirstDivergence, Verdict
from diffcheck.report.folding import (
    by_reason,
    equal_before,
    folded,
    interval_in_short,
    layer_of,
    record_in_words,
    short_count,
    side_in_words,
    span_of,
    worst_in_words,
)

_STYLE = {"equal": "green", "diverged": "red", "not_comparable": "yellow", "inconclusive": "yellow"}
_STATUS = {"equal": "green", "origin": "bold red", "receiver": "red", "unobserved": "yellow"}
#: Signs of the statuses, told apart without colour.
_SIGN = {"equal": "·", "origin": "█", "receiver": "▒", "unobserved": "?"}
_BLOCKS = "·▁▂▃▄▅▆▇█"
_TITLE = {"equal": "EQUAL", "diverged": "DIVERGED", "not_comparable": "NOT COMPARABLE", "inconclusive": "INCONCLUSIVE"}


def print_verdict(verdict: Verdict, console: Console, *, every_boundary: bool = False) -> None:
    """Print the whole report. ``every_boundary`` lists equal boundaries one by one instead of in runs."""
    console.print(_headline(verdict))
    if verdict.not_comparable:
        console.print(_mismatches(verdict))
    if verdict.first_divergence:
        console.print(_divergence(verdict.first_divergence))
        print_contracts(verdict.contracts, console)
    for ablation in verdict.ablation:
        print_ablation(ablation, console)
    if verdict.boundaries:
        console.print(_table(verdict.boundaries, every_boundary))
    if verdict.first_divergence and (strip := _strip(verdict.boundaries)):
        console.print(strip)
    if verdict.logprobs:
        console.print(_logprobs(verdict))
    if verdict.prompt_logprobs:
        console.print(_statistics("Prompt logprobs: ", verdict.prompt_logprobs))
    elif verdict.prompts_not_compared:
        console.print(Text(f"Prompt logprobs: not compared, {verdict.prompts_not_compared}", style="yellow"))
    if verdict.routing:
        console.print(_routing(verdict.routing))
    if verdict.recorded:
        console.print(_recorded(verdict.recorded))
    if verdict.coverage.expected:
        console.print(_coverage(verdict))
    if seconds := verdict.evidence.get("seconds"):
        console.print(Text(_seconds(seconds), style="dim"))


def _headline(verdict: Verdict) -> RenderableType:
    style = _STYLE[verdict.verdict]
    lines = [Text(verdict.summary), *(Text(note, style="yellow") for note in verdict.notes)]
    for role, side in (("rollout", "left"), ("train", "right")):
        if side in verdict.evidence:
            lines.append(Text(f"{role:>8}: {side_in_words(verdict.evidence[side])}", style="dim"))
            for change in verdict.evidence[side]["changed"]:
                lines.append(Text(f"          changed on purpose: {change}", style="magenta"))
            for warning in verdict.evidence[side].get("warnings", ()):
                lines.append(Text(f"          warning: {warning}", style="yellow"))
    title = Text(_TITLE[verdict.verdict], style=f"bold {style}")
    return Panel(Group(*lines), title=title, title_align="left", border_style=style)


def _mismatches(verdict: Verdict) -> RenderableType:
    table = Table(title="Fields that differ", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("field", style="bold")
    table.add_column("rollout", overflow="fold")
    table.add_column("train", overflow="fold")
    for m in verdict.not_comparable:
        table.add_row(Text(m.field), Text(str(m.left)), Text(str(m.right)))
    return table


def _divergence(first: FirstDivergence) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    name = Text(first.boundary, style="bold red")
    if first.role == "interval":
        grid.add_row("between", Text(interval_in_short(first), style="bold red"))
        grid.add_row("", "all but the last were not observed on both sides: the cause is one of these")
    else:
        grid.add_row("boundary", name)
    index = "" if first.index is None else f", element {first.index}"
    grid.add_row("first at", f"sample {first.sample}, position {first.position}{index}")
    if first.left is not None:
        grid.add_row("values", f"{first.left!r} ({first.left_bits})  against  {first.right!r} ({first.right_bits})")
    if first.differing is not None:
        share = 100 * first.differing / max(1, first.elements)
        grid.add_row("how much", f"{first.differing:,} of {first.elements:,} elements ({share:.1f} %)")
        grid.add_row("", f"max |difference| {first.max_abs:.3g}, max {first.max_ulp:,} ulp")
    if first.ulp_histogram and len(first.ulp_histogram) > 2:
        grid.add_row("ulp", f"{_bars(first.ulp_histogram[1:])}  from 1, a power of two a bar, logarithmic")
    grid.add_row("rows", f"{first.rows_origin:,} of {first.rows:,} rows differ although all their inputs are equal")
    grid.add_row("equal before", equal_before(first))
    if first.dtypes and first.dtypes[0] != first.dtypes[1]:
        grid.add_row("dtypes", f"{first.dtypes[0]} against {first.dtypes[1]}")
    return Panel(grid, title="First divergence", title_align="left", border_style="red")


def _routing(layers: list[LayerRouting]) -> RenderableType:
    """Agreement of the routers by layer."""
    table = Table(title="Routing", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("layer", "same experts", "input differs", "differs on equal input", "margin, ulp: least", "median"):
        table.add_column(column, justify="right")
    for x in layers:
        unseen = "not observed"
        table.add_row(
            str(x.layer),
            f"{x.agreeing:,} of {x.tokens:,}",
            unseen if x.inputs_differing is None else f"{x.inputs_differing:,}",
            unseen if x.differing_on_equal_inputs is None else f"{x.differing_on_equal_inputs:,}",
            unseen if x.margin_least is None else f"{x.margin_least:,}",
            unseen if x.margin_median is None else f"{x.margin_median:,.0f}",
        )
    return table


def _bars(counts: Sequence[int]) -> str:
    """Counts as a line of blocks, logarithmic; a dot where there is none."""
    top = math.log2(max(counts) + 1)
    heights = [math.ceil((len(_BLOCKS) - 1) * math.log2(n + 1) / top) if n else 0 for n in counts]
    return "".join(_BLOCKS[height] for height in heights)


def _strip(results: list[BoundaryResult]) -> RenderableType | None:
    """A line a layer with a sign a boundary; layers that look the same share one."""
    layers: dict[str, list[str]] = {}
    for result in results:
        layer = layer_of(result.name)
        if layer is not None:
            layers.setdefault(layer, []).append(result.status)
    if not layers:
        return None
    legend = Text("Layers, a sign a boundary:")
    for status, sign in _SIGN.items():
        legend.append(f"  {sign} {status}", style=_STATUS[status])
    lines = [legend]
    for statuses, run in groupby(layers, key=lambda layer: layers[layer]):
        same = list(run)
        line = Text(f"{same[0] if len(same) == 1 else f'{same[0]}-{same[-1]}':>7}  ")
        for status in statuses:
            line.append(_SIGN[status], style=_STATUS[status])
        lines.append(line)
    return Group(*lines, Text(""))


def _table(results: list[BoundaryResult], every: bool) -> RenderableType:
    table = Table(
        title="Boundaries, in dataflow order", title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False
    )
    table.add_column("boundary ", overflow="fold", min_width=36)
    table.add_column("status ", no_wrap=True)
    for name in (" differing", " max |Δ|", " max ulp"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in [[r] for r in results] if every else folded(results):
        table.add_row(*_row(group))
    return table


def _row(group: list[BoundaryResult]) -> tuple[RenderableType, ...]:
    status = group[0].status
    name = group[0].name if len(group) == 1 else span_of([r.name for r in group])
    label = Text(status if len(group) == 1 else f"{len(group)} {status}", style=_STATUS[status])
    if status == "unobserved":
        return Text(name), label, "", "", ""
    elements = sum(r.elements for r in group)
    if any(r.differing is None for r in group):
        rows = sum(r.rows_differing for r in group)
        return Text(name), label, f"{rows:,} rows", "digest", "digest"
    differing = sum(r.differing or 0 for r in group)
    if not differing:
        return Text(name), label, "0", "", ""
    share = f"{100 * differing / max(1, elements):.3g} %" if differing > 1 else "1 element"
    max_abs, max_ulp = max(r.max_abs or 0 for r in group), max(r.max_ulp or 0 for r in group)
    return Text(name), label, share, f"{max_abs:.3g}", short_count(max_ulp)


def _logprobs(verdict: Verdict) -> RenderableType:
    assert verdict.logprobs is not None
    return _statistics("Logprobs: ", verdict.logprobs)


def _statistics(what: str, s: LogprobStats) -> Text:
    style = "green" if not s.mismatch_count else "red"
    line = Text(what)
    line.append(f"{s.mismatch_count:,} of {s.compared:,} differ", style=style)
    if s.mismatch_count:
        line.append(f"; max |Δ| {s.max_abs_diff:.3g}, mean |Δ| {s.mean_abs_diff:.3g} nats")
        line.append(f", k1 {s.k1:.3g}, k3 {s.k3:.3g}")
    return line


def _recorded(report: RecordedReport) -> RenderableType:
    lines = [Text(record_in_words(report))]
    for found in report.agreements:
        line = _statistics(f"  against the {found.side} side ({found.engine}): ", found.stats)
        line.append(worst_in_words(found))
        lines.append(line)
    return Group(*lines)


def _coverage(verdict: Verdict) -> RenderableType:
    c = verdict.coverage
    lines = [Text(f"Coverage: {c.observed} of {c.expected} boundaries observed on both sides")]
    for reason, names in by_reason(c.unobserved).items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(Text(f"  not observed: {shown} — {reason}", style="yellow"))
    return Group(*lines)


def _seconds(seconds: dict[str, float]) -> str:
    return f"Time: {sum(seconds.values()):.1f} s = " + ", ".join(f"{step} {s:.1f}" for step, s in seconds.items())
