"""``rlk-diff import``: other projects' dumps as samples and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffcheck.base.console import Terminal
from diffcheck.cli.commands import app

_FORMATS = "verl, slime, miles, vime, trl (samples); sglang, msprobe, rl-kernel, hf-debugger (traces)."


@app.command("import")
def import_(
    kind: Annotated[str, typer.Argument(metavar="FORMAT", help=_FORMATS)],
    path: Annotated[Path, typer.Argument(help="The dump: a file or a folder.")],
    out: Annotated[Path, typer.Option("--out", help="Samples file or trace folder to write.")],
    model: Annotated[str | None, typer.Option("--model", help="Traces: the model that was run, for its sizes.")] = None,
    samples: Annotated[Path | None, typer.Option("--samples", help="Traces: the sequences that were run.")] = None,
    retokenize: Annotated[
        str | None,
        typer.Option("--retokenize", metavar="MODEL", help="verl, trl: take the tokens that its tokenizer makes."),
    ] = None,
    side: Annotated[str | None, typer.Option("--side", help="rl-kernel: rollout or training.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")] = False,
) -> None:
    """Make samples or a trace of another project's dump; what it lacks stays unobserved.

    [bold]Examples[/bold]

      rlk-diff import slime rollout_3.pt --out samples.jsonl
      rlk-diff import verl dumps/12.jsonl --retokenize ./Qwen3-0.6B --out samples.jsonl
      rlk-diff import sglang /tmp/dump --model ./Qwen3-0.6B --samples samples.jsonl --out traces/rollout
      rlk-diff import rl-kernel bundle --side training --model ./Qwen3-0.6B --samples one.jsonl --out traces/train
    """
    from diffcheck.foreign import import_dump

    done = import_dump(
        kind, path, out, model=model, samples=samples, retokenize=retokenize, side=side, overwrite=overwrite
    )
    terminal = Terminal()
    terminal.print(f"{done.out}: {done.summary}", soft_wrap=True, highlight=False)
    for note in done.notes:
        terminal.print(f"  {note}", soft_wrap=True, highlight=False)
