"""The command ``rlk-grpo``."""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from diffcheck.base.console import Terminal
from diffcheck.base.models import BUILT_IN
from diffcheck.base.progress import is_quiet, set_quiet
from diffcheck.cli import guard
from diffcheck.cli.options import Quiet, Version
from integration.grpo.budget import Budget
from integration.grpo.config import load_config, stored_config
from integration.grpo.report.command import report
from integration.grpo.tasks import TASKS

app = typer.Typer(
    name="rlk-grpo",
    help="GRPO with real vLLM and real Megatron-core, every step's logprobs compared bit by bit.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
#: Progress; what a run finds goes to its folder.
_console = Terminal(stderr=True)


@app.callback()
def _options(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; faults and the last line only.")] = False,
    version: Version = False,
) -> None:
    set_quiet(quiet)


@app.command()
def run(
    out: Annotated[Path, typer.Option("--out", help="Folder of the run.")],
    config: Annotated[Path | None, typer.Option("--config", help="TOML; default: the built-in tiny task.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1)] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="strict or native.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="cpu or gpu.")] = None,
    model: Annotated[str | None, typer.Option("--model", help=f"Folder, or {', '.join(BUILT_IN)}.")] = None,
    task: Annotated[str | None, typer.Option("--task", help=f"{', '.join(TASKS)}.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float32.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel ranks of each engine.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0)] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="Arithmetic of mode strict.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=1, help="End in time, start included, at the end of a step; then --resume."),
    ] = None,
    asynchronous: Annotated[bool, typer.Option("--async", help="Roll out one step ahead of training.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Engines as Ray actors.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's newest checkpoint.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train, and count at every step what the two engines disagree on.

    Ctrl-C or SIGTERM ends it at the end of the step in progress, with a checkpoint; a second one at once.
    """
    from integration.grpo.loop import Run

    given: dict[str, Any] = {
        "steps": steps,
        "mode": mode,
        "engine": engine,
        "model": model,
        "task": task,
        "dtype": dtype,
        "tp": tp,
        "seed": seed,
        "profile": profile,
        "staleness": 1 if asynchronous else None,
        "ray": ray or None,
    }
    overrides = {name: value for name, value in given.items() if value is not None}
    chosen = load_config(config, overrides, stored_config(out) if resume else None)
    module, function = ("ray_engines", "open_ray") if chosen.ray else ("engines", "open_process")
    open_engine = getattr(importlib.import_module(f"integration.grpo.workers.{module}"), function)
    command = shlex.join(["rlk-grpo", *sys.argv[1:]])
    budget = Budget(seconds, _announce)
    records = Run(
        chosen,
        out,
        open_engine,
        resume=resume,
        command=command,
        stop_after=budget,
        announce=_announce,
        finished=_show,
    ).run()
    last = records[-1]
    compared = sum(record["compared"] for record in records)
    different = sum(record["mismatch_count"] for record in records)
    _console.print(f"{len(records)} steps, reward {last['reward_mean']:.3f}; {different} of {compared} logprobs differ")
    if budget.asked is not None and len(records) < chosen.steps:
        raise typer.Exit(128 + budget.asked)


app.command()(report)


def _announce(text: str) -> None:
    if is_quiet():
        return
    _console.print(text, style="dim", highlight=False, soft_wrap=True)


def _show(record: dict[str, Any]) -> None:
    if is_quiet():
        return
    most = record["max_abs_diff"]
    _console.print(
        f"step {record['step']:4}  reward {record['reward_mean']:.3f}  mismatch {record['mismatch_count']}/"
        f"{record['compared']}  max {'not finite' if most is None else f'{most:.2e}'}  "
        f"{record['seconds']['total']:.2f} s",
        highlight=False,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; faults end as in ``rlk-diff``."""
    sys.exit(guard(lambda: app(args=arguments, standalone_mode=False)))
