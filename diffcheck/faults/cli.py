"""``rlk-diff faults``: inject a fault that people really met, and see whether the tool names it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffcheck.errors import ExitCode, InputError
from diffcheck.faults.library import CONTROLS, FAULTS
from diffcheck.files import check_writable, write_text
from diffcheck.report.progress import ProgressLine
from diffcheck.report.terminal import print_verdict

if TYPE_CHECKING:
    from diffcheck.faults.laboratory import Outcome


def faults(
    name: Annotated[str | None, typer.Argument(help="A fault or control; see --list.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List all faults and negative controls.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Run all; print precision and recall.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the outcomes as JSON.")] = None,
) -> None:
    """Inject a known fault into one side of a small model and check what is named.

    [bold]Examples[/bold]

      rlk-diff faults --list
      rlk-diff faults rope-bf16-table
      rlk-diff faults --all --json faults.json

    Exit codes: 0 everything was named as expected, 1 something was not, 2 usage error.
    """
    console = Console()
    library = {**FAULTS, **CONTROLS}
    if listed:
        console.print(_catalogue())
        return
    if every == (name is not None):
        raise InputError("give the name of one fault, or --all", "list them with rlk-diff faults --list")
    if name is not None and name not in library:
        raise InputError(f"fault {name!r} is unknown", "list them with rlk-diff faults --list")
    if json_out:
        check_writable(json_out)
    from diffcheck.faults.laboratory import run_fault, scores

    chosen = list(library.values()) if name is None else [library[name]]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="rlk-faults-") as folder, ProgressLine(Console(stderr=True)) as progress:
        for done, fault in enumerate(chosen):
            progress(fault.name, done, len(chosen))
            outcomes.append(run_fault(fault, Path(folder)))
    precision, recall = scores(outcomes)
    if name is not None and outcomes[0].report is not None:
        print_verdict(outcomes[0].report, console)
    console.print(_results(outcomes))
    if name is None:
        count = f"{len(FAULTS)} faults, {len(CONTROLS)} negative controls"
        console.print(f"{count}: precision {precision:.3f}, recall {recall:.3f}")
    if json_out:
        result = {"precision": precision, "recall": recall, "outcomes": [o.to_json() for o in outcomes]}
        write_text(json_out, json.dumps(result, indent=1) + "\n")
    raise typer.Exit(ExitCode.EQUAL if all(o.found for o in outcomes) else ExitCode.DIVERGED)


def _results(outcomes: list[Outcome]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in ("fault", "named first", "contract field"):
        table.add_column(heading, overflow="fold")
    for o in outcomes:
        mark = Text("ok", style="green") if o.found else Text("wrong", style="red")
        table.add_row(mark, Text(o.fault.name), Text(o.named or o.verdict), Text(", ".join(o.fields)))
        for wrong in o.wrong:
            table.add_row("", "", Text(wrong, style="red"), "")
    return table


def _catalogue() -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("fault", "what is wrong", "must be named", "reported in"):
        table.add_column(heading, overflow="fold")
    for fault in (*FAULTS.values(), *CONTROLS.values()):
        table.add_row(fault.name, fault.cause, fault.where or "nothing: equal", fault.reports)
    return table
