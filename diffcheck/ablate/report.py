"""What ablation found, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from diffcheck.ablate.result import sides_in_words

_STYLE = {"explained": "green", "remainder": "yellow", "inconclusive": "yellow"}
_BAR = 10
#: Boundaries that are named before the rest is counted.
_SHOWN = 3


def print_ablation(ablation: Mapping[str, Any], console: Console) -> None:
    """Print one entry of ``verdict.ablation``."""
    style = _STYLE[ablation["status"]]
    parts: list[RenderableType] = [Text(ablation["summary"])]
    if ablation["reason"]:
        parts.append(Text(ablation["reason"], style="yellow"))
    if any(u["alone"] or u["left_out"] for u in ablation["units"]):
        parts += list(_causes(ablation))
        parts += [Text(""), _units(ablation)]
        parts += list(_notes(ablation))
    if any(o["after"] for o in ablation["origins"]):
        parts += [Text(""), _walk(ablation)]
        if any(o["after"] is None for o in ablation["origins"]):
            first, last = ablation["bracket"] or ("?", "?")
            parts.append(Text(f"By bisection: the logprobs depend on origins from {first} to {last}."))
    parts += [Text(line, style="dim") for line in _cost(ablation)]
    host, donor = sides_in_words(ablation["host"], ablation["donor"], ablation["host_side"])
    title = Text(f"Ablation: {donor}'s operators in {host}'s forward", style=f"bold {style}")
    console.print(Panel(Group(*parts), title=title, title_align="left", border_style=style))


def _units(ablation: Mapping[str, Any]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("operator", overflow="fold")
    for heading in ("alone removes", "left out leaves"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for unit in ablation["units"]:
        name = Text(_short(unit), style="bold" if unit["in_minimal"] else "dim")
        alone, left_out = unit["alone"], unit["left_out"]
        if not _proven(left_out):
            table.add_row(name, _removed(alone), "unproven" if left_out else "", "")
            continue
        leaves = 1 - left_out["removed"]["mean"]
        table.add_row(name, _removed(alone), _percent(leaves) + ("*" if left_out["place"] else ""), _bar(leaves))
    return table


def _causes(ablation: Mapping[str, Any]) -> Iterator[Text]:
    """Each difference once, with the operators that have it, then what could not be said."""
    found: dict[tuple[str, str], list[str]] = {}
    unsure: dict[str, list[str]] = {}
    for unit in ablation["units"]:
        for d in unit["differs_in"]:
            found.setdefault((d["sentence"], d["field"]), []).append(_short(unit))
        if unit["unexplained"]:
            unsure.setdefault(unit["unexplained"], []).append(_short(unit))
    for (sentence, path), units in found.items():
        yield Text("")
        yield Text(f"{sentence}  ({path})", style="bold")
        yield Text(f"  at {', '.join(units)}", style="dim")
    for why, units in unsure.items():
        yield Text("")
        yield Text(f"{', '.join(units)}: {why}", style="yellow")


def _proven(trial: Mapping[str, Any] | None) -> bool:
    return trial is not None and trial["evidence"] != "unproven"


def _removed(trial: Mapping[str, Any] | None) -> str:
    """What was not proven has no number: it could be any."""
    if trial is None:
        return ""
    return _percent(trial["removed"]["mean"]) if _proven(trial) else "unproven"


def _short(unit: Mapping[str, Any]) -> str:
    """The operator, and in how many layers it differs."""
    name = str(unit["name"])
    plain = name.removeprefix("layers.*.").removeprefix("self_attn.").removeprefix("mlp.")
    return f"{plain} × {len(unit['boundaries'])}" if "*" in name else name


def _percent(share: float) -> str:
    """Of the mean |difference| of the logprobs. Small shares keep their sign and are not called nothing."""
    if share and abs(share) < 0.001:
        return "< 0.1 %" if share > 0 else "> -0.1 %"
    return f"{100 * share:.1f} %"


def _bar(share: float) -> Text:
    filled = round(_BAR * min(1.0, max(0.0, share)))
    return Text("█" * filled + "·" * (_BAR - filled), style="red" if filled else "dim")


def _notes(ablation: Mapping[str, Any]) -> Iterator[Text]:
    units = ablation["units"]
    members = [u for u in units if u["in_minimal"]]
    if len(members) > 1 and all(_proven(u["alone"]) for u in members):
        alone = sum(u["alone"]["removed"]["mean"] for u in members)
        yield Text(f"One by one they remove {_percent(alone)} in sum; together, 100 %.")
    for pair in filter(lambda pair: _proven(pair["trial"]), ablation["pairs"]):
        a, b = (_percent(x) for x in pair["alone"])
        names = " and ".join(_short(unit) for unit in units if unit["name"] in pair["units"])
        yield Text(f"  {names}: alone {a} and {b}, both {_removed(pair['trial'])}", style="dim")
    spare = [u["name"] for u in units if not u["in_minimal"]]
    if ablation["minimal"] and spare:
        yield Text(f"Differ without being needed: {', '.join(spare)}")
    if ablation["minimal_verified"] and len(ablation["minimal"]) > 1:
        yield Text("The set is minimal: with any one of them left out, logprobs differ.")
    trials = [t for u in units for t in (u["alone"], u["left_out"]) if t]
    if any(t["place"] for t in trials):
        yield Text(
            "* left out in one layer only: over all layers it would take too many turns of the engines", style="dim"
        )
    for note in sorted({t["note"] for t in trials if t["note"]}):
        yield Text(f"  {note}", style="yellow")
    if also := sorted({name for t in trials for name in t["elsewhere"]}):
        more = f" and {len(also) - _SHOWN} more" if len(also) > _SHOWN else ""
        yield Text(
            f"On the inputs of these forwards the sides also differ at {', '.join(also[:_SHOWN])}{more}.", style="dim"
        )


def _walk(ablation: Mapping[str, Any]) -> RenderableType:
    table = Table(
        title="Walking on: independent origins in dataflow order, each aligned with all before it",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("origin", overflow="fold")
    for heading in ("differ then", "mean |Δ| then"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    before = ablation["baseline"]["mean_abs_diff"]
    skipped = 0
    for origin in ablation["origins"]:
        after = origin["after"]
        if after is None:
            skipped += 1
            continue
        if skipped:
            table.add_row(Text(f"… {_origins(skipped)}", style="dim"), "", "", "")
            skipped = 0
        name = Text(" → ".join(origin["interval"]))
        if origin["confirmed"] is False:
            name.append("  (another boundary differs first after it)", style="yellow")
        mean = after["mean_abs_diff"]
        table.add_row(name, f"{after['mismatch_count']:,}", f"{mean:.3g}", _bar(mean / before if before else 0.0))
    if skipped:
        table.add_row(Text(f"… {_origins(skipped)}, on which no logprob depends", style="dim"), "", "", "")
    return table


def _origins(count: int) -> str:
    return "1 origin" if count == 1 else f"{count} origins"


def _cost(ablation: Mapping[str, Any]) -> Iterator[str]:
    proven = {t["evidence"] for u in ablation["units"] for t in (u["alone"], u["left_out"]) if t}
    if "engine" in proven:
        yield "Each forward was proven by the engine whose operators it borrows: same inputs, same bits."
    if ablation["unaligned"]:
        names = list(ablation["unaligned"])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"Not aligned by itself: {', '.join(names[:3])}{more}"
    runs = ", ".join(f"{count} of the {side}" for side, count in ablation["runs"].items())
    yield f"Forwards: {runs}; {ablation['seconds']:.1f} s"
