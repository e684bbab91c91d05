"""The answer for a tired person: what differs, in words, first; then how sure that is; then what stays open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from reference.contract import CONTRACTS, fields

_STYLE = {"match": "green", "no_match": "yellow", "inconclusive": "yellow"}
#: Values of an undecided field that are listed before the rest is counted.
_SHOWN = 3


def print_contracts(contracts: Mapping[str, Any], console: Console) -> None:
    """Print ``verdict.contracts``: nothing where inference did not run."""
    if not contracts["left"]:
        return
    left, right = contracts["left"][0], contracts["right"][0]
    lines: list[RenderableType] = [Text(line, style="bold") for line in why(left, right, contracts["differs_in"])]
    for side in (left, right):
        lines += [Text(""), *side_lines(side), *_open_in_short(side)]
    style = "red" if contracts["differs_in"] else "yellow"
    console.print(Panel(Group(*lines), title=Text(f"Why: {left['boundary']}"), title_align="left", border_style=style))


def print_inference(answer: Mapping[str, Any], console: Console) -> None:
    """Print the answer for one side (`Inference.to_json`)."""
    style = _STYLE[answer["status"]]
    title = Text.assemble((answer["status"].replace("_", " ").upper(), f"bold {style}"), f"  {answer['boundary']}")
    lines = [*side_lines(answer), *_undecided(answer)]
    if answer["decided"]:
        lines += [Text(""), Text(f"{answer['engine']}, at every contract that fits:")]
        lines += [Text(f"  {_words(answer['operator'], p, v)}  ({p})") for p, v in answer["decided"].items()]
    console.print(Panel(Group(*lines), title=title, title_align="left", border_style=style))


def why(left: Mapping[str, Any], right: Mapping[str, Any], differs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The conclusion over both sides, one sentence a line."""
    if differs:
        lines = [f"{d['sentence']}  ({d['field']})" for d in differs]
        if not (left["complete"] and right["complete"]):
            lines.append("Not every contract was tried: this is the smallest difference among those that were.")
        return lines
    if left["status"] == right["status"] == "match":
        return ["One contract gives the bits of both sides: they differ here only because their inputs do."]
    departs = [side for side in (left, right) if side.get("scalar")]
    if departs:
        lines = [f"{side['engine']} departs from the model: it {side['cause']}." for side in departs]
        others = [side for side in (left, right) if not side.get("scalar")]
        follows = "{} follows the model: the configured value gives every bit of it."
        lines += [follows.format(side["engine"]) for side in others if side["status"] == "match"]
        lines += [
            f"{side['engine']} could not be explained; see below." for side in others if side["status"] != "match"
        ]
        return lines
    unsure = [side["engine"] for side in (left, right) if side["status"] != "match"]
    return [f"Inconclusive: {' and '.join(dict.fromkeys(unsure))} could not be explained; see below."]


def side_lines(answer: Mapping[str, Any]) -> list[Text]:
    """One side's answer (`Inference.to_json`): what fits or comes nearest, and how sure that is."""
    engine, operator = answer["engine"], answer["operator"]
    if not answer["elements"]:
        return [Text(f"{engine}: {answer['reason']}", style="yellow")]
    if not answer["fits"]:
        return _miss(answer)
    contracts = "1 contract gives" if answer["fits"] == 1 else f"{answer['fits']:,} contracts give"
    known = f"; {', '.join(answer['profiles'])} among them" if answer["profiles"] else ""
    space = f"of {answer['space']:,} computations of {operator}" if answer["complete"] else f"of {operator}"
    lines = [
        Text(
            f"{engine}: {contracts} all {answer['elements']:,} elements ({_rows(answer)}) from its own inputs, "
            f"{space}{known}.",
            style=_STYLE[answer["status"]],
        )
    ]
    if answer["pending"]:
        lines.append(Text(f"  {answer['pending']:,} more fit the rows that they were tried on", style="yellow"))
    if answer["reason"]:
        lines.append(Text(f"  {answer['reason']}", style="yellow"))
    return lines


def _miss(answer: Mapping[str, Any]) -> list[Text]:
    share = 100 * answer["matching"] / answer["elements"]
    nearest = ", ".join(f"{path} = {value}" for path, value in answer["nearest_fields"].items())
    if answer.get("scalar"):
        return [
            Text(f"{answer['engine']}: departs from the model: it {answer['cause']}.", style="red"),
            Text(f"  found from its own bits in {_rows(answer)}; {answer['reason']}", style="dim"),
        ]
    return [
        Text(f"{answer['engine']}: {answer['reason']}", style="yellow"),
        Text(
            f"  the nearest contract is no match: {answer['matching']:,} of {answer['elements']:,} elements "
            f"({share:.4g} %), worst {answer['max_ulp']:,} ulp; "
            f"it fails in {answer['rows_failing']:,} of {_rows(answer)}"
        ),
        Text(f"  it has {nearest}", style="dim"),
    ]


def _rows(answer: Mapping[str, Any]) -> str:
    rows, total = answer["rows"], answer["total_rows"]
    text = f"{rows:,} rows" if rows == total else f"{rows:,} of {total:,} rows"
    some = answer["columns"] != answer["width"]
    return f"{text}, {answer['columns']:,} of {answer['width']:,} columns" if some else text


def _undecided(answer: Mapping[str, Any]) -> list[Text]:
    """Open fields, those that no input of this call could show in one line per reason."""
    by_reason: dict[str, list[str]] = {}
    for u in answer["undecided"]:
        values = [str(v) for v in u["values"]]
        more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
        name = f"{u['field']} ({', '.join(values[:_SHOWN])}{more})"
        by_reason.setdefault(_reason(u), []).append(name)
    return [Text(f"  open: {', '.join(names)}: {reason}", style="dim") for reason, names in by_reason.items()]


def _open_in_short(answer: Mapping[str, Any]) -> list[Text]:
    """The open fields by name; `rlk-diff infer` says more."""
    names = [u["field"] for u in answer["undecided"]]
    return [Text(f"  not decided by these inputs: {', '.join(names)}", style="dim")] if names else []


def _reason(undecided: Mapping[str, Any]) -> str:
    probe = undecided["probe"]
    return f"decided by inputs like {probe['kind']}" if probe else str(undecided["reason"])


def _words(operator: str, path: str, value: Any) -> str:
    return fields(CONTRACTS[operator])[path].words(value)
