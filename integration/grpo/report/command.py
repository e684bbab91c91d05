"""``rlk-grpo report``: reads a run's folder, prints a summary, writes figures and one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from diffcheck.base.console import Terminal
from diffcheck.base.errors import ExitCode
from diffcheck.base.files import check_writable
from integration.grpo.report import coverage
from integration.grpo.report.read import Run, RunError, read_run

HTML, FIGURES = "report.html", "figures"


def report(
    folder: Annotated[Path, typer.Argument(help="Output folder of a run.", metavar="DIR")],
    against: Annotated[
        Path | None, typer.Option("--against", help="Folder of the other arm, drawn beside it.", metavar="DIR")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help=f"Default: {HTML} in DIR.", metavar="OUT")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")] = False,
) -> None:
    """Summarise a finished run: DIR/report.html, DIR/figures, and what was compared."""
    raise typer.Exit(write(folder, against, html, tensorboard, Terminal()))


def write(folder: Path, against: Path | None, html: Path | None, tensorboard: bool, console: Console) -> ExitCode:
    """What the command does.

    Returns:
        DIVERGED where a strict run has a mismatch or a fallback, else EQUAL.

    Raises:
        RlkError: a folder is no run or is damaged, or an output cannot be written.
    """
    # Imported here: whoever only runs needs none of what draws.
    from integration.grpo.report.figures import figures, save
    from integration.grpo.report.html import write_report
    from integration.grpo.report.tensorboard import write_events

    page = html or folder / HTML
    run = read_run(folder)
    check_writable(page)
    other = None if against is None else read_run(against)
    if other is not None:
        _check_same_experiment(run, other)
    print_summary(run, other, console)
    drawn = figures(run, other)
    written = [*save(drawn, folder / FIGURES)[:1]]
    write_report(page, run, other, drawn)
    if tensorboard:
        written += [write_events(arm) for arm in (run, other) if arm is not None]
    console.print(Text(f"written: {', '.join(map(str, [page, written[0].parent, *written[1:]]))}", style="dim"))
    return run.exit_code


def _check_same_experiment(run: Run, other: Run) -> None:
    """Two arms may differ in arithmetic only: their prompts are the same, step by step."""
    for number, (left, right) in enumerate(zip(run.prompts, other.prompts, strict=False), start=1):
        if left != right:
            raise RunError(
                f"{other.folder}: step {number} has other prompts than {run.folder}",
                "compare runs of one configuration",
            )


def print_summary(run: Run, other: Run | None, console: Console) -> None:
    """The headline of each arm, what was compared, operators, and time."""
    for arm in (run, other):
        if arm is not None:
            _print_arm(arm, console, main=arm is run)
    times = [coverage.seconds(arm) for arm in (run, other) if arm is not None]
    words = ", ".join(f"{phase} {value:.2f}" for phase, value in times[0].items() if value or phase == "total")
    line = f"seconds a step: {words}"
    if len(times) > 1 and times[1]["total"]:
        line += f"; {times[0]['total'] / times[1]['total']:.2f} times the other arm"
    console.print(Text(line, style="dim"))


def _print_arm(arm: Run, console: Console, main: bool) -> None:
    style = "red" if arm.mismatches or arm.fallbacks else "green"
    if arm.mode != "strict":
        style = "cyan"
    rewards = f"reward {arm.steps[0]['reward_mean']:.3g} in step 1, {arm.steps[-1]['reward_mean']:.3g} in the last"
    console.print(
        Panel(
            Text(f"{coverage.headline(arm)}\n{rewards}"),
            title=Text(arm.mode.upper(), style=f"bold {style}"),
            title_align="left",
            border_style=style,
        )
    )
    for step in arm.steps:
        if step.get("note"):
            console.print(Text(f"  step {step['step']}: {step['note']}", style="red"))
    if not main:
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    for name, value in coverage.coverage(arm):
        grid.add_row(name, Text(value, style="red" if name == "fallbacks" and arm.fallbacks else ""))
    console.print(grid)
    rows = list(coverage.operators(arm))
    if rows:
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("operator", "rollout", "train", "contract"):
            table.add_column(name, justify="right" if name in ("rollout", "train") else "left")
        for operator, rollout, train, contract in rows:
            table.add_row(operator, rollout, train, contract[:16])
        console.print(table)
