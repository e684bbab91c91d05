"""``rlk-diff twice``: does one engine repeat itself?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from diffcheck.base.console import Terminal
from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.files import STANDARD_OUTPUT, check_writable, write_json
from diffcheck.base.progress import ProgressLine
from diffcheck.capture.adapter import ENGINES
from diffcheck.cli.commands import app, run_settings, with_run_options

_CONDITIONS = "again, load, beside"


@app.command()
@with_run_options
def twice(
    context: typer.Context,
    engine: Annotated[str, typer.Option("--engine", help=", ".join(ENGINES))] = "vllm",
    condition: Annotated[
        list[str] | None,
        typer.Option(
            "--condition", help="again: as it was; load: beside busy processes; beside: with other sequences; all."
        ),
    ] = None,
    neighbours: Annotated[int, typer.Option("--neighbours", min=1, help="Sequences of condition beside.")] = 4,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the answers as JSON.")] = None,
    option: Annotated[list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="As of capture.")] = None,
) -> None:
    """Run one engine again, under load, and with other sequences in its batches, and compare every boundary.

    [bold]Examples[/bold]

      rlk-diff twice
      rlk-diff twice --engine megatron --model ./Qwen3-0.6B --samples rollouts.jsonl
      rlk-diff twice --condition beside --neighbours 12 --profile strict-v1/fma32-seq

    Exit codes: 0 every run has the bits of the first, 1 one has not, 2 usage or environment error, 4 inconclusive.
    """
    from diffcheck.twice import CONDITIONS, Repeat, run_twice

    for name, value, allowed in (
        ("--engine", engine, tuple(ENGINES)),
        *(("--condition", c, CONDITIONS) for c in condition or ()),
    ):
        if value not in allowed:
            raise InputError(f"{name} {value!r} is none of {', '.join(allowed)}", f"choose one of {', '.join(allowed)}")
    if json_out:
        check_writable(json_out)
    chosen = tuple(dict.fromkeys(condition or CONDITIONS))
    # With the answers alone on standard output, what is told goes beside it.
    out = Terminal(stderr=json_out == STANDARD_OUTPUT)

    def tell(repeat: Repeat) -> None:
        equal = repeat.exit_code is ExitCode.EQUAL
        word = ("equal  ", "green") if equal else ("differs", "red")
        out.print(Text.assemble(word, f" {engine}, {repeat.what}: {repeat.found}"), soft_wrap=True)

    settings = run_settings(context)
    with ProgressLine(Terminal(stderr=True)) as progress:
        results = run_twice(settings, engine, chosen, progress, neighbours=neighbours, told=tell)
    if json_out:
        listed = [result.to_json() for result in results]
        write_json(json_out, {"schema": 1, "engine": engine, "runs": listed})
    codes = {result.exit_code for result in results}
    worst = next(
        c for c in (ExitCode.DIVERGED, ExitCode.NOT_COMPARABLE, ExitCode.INCONCLUSIVE, ExitCode.EQUAL) if c in codes
    )
    raise typer.Exit(worst)
