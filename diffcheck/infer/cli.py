"""``rlk-diff infer``: which contract did one side follow at one boundary?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffcheck.base.console import Terminal
from diffcheck.base.errors import ExitCode
from diffcheck.base.files import STANDARD_OUTPUT, check_writable, write_json
from diffcheck.base.progress import ProgressLine
from diffcheck.infer.explain import BUDGET, ROWS


def infer(
    trace: Annotated[Path, typer.Argument(help="Trace folder of one side.")],
    boundary: Annotated[str, typer.Option("--boundary", help="e.g. layers.0.input_layernorm.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Folder of the traced model, where it is not found by itself.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows sampled before all are looked at.")] = ROWS,
    budget: Annotated[
        float, typer.Option("--budget", min=0.1, help="Seconds; what is known then is reported.")
    ] = BUDGET,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the answer as JSON; -: to standard output, alone.")
    ] = None,
) -> None:
    """Find every contract that gives a boundary's bits from the side's own inputs.

    [bold]Examples[/bold]

      rlk-diff localize --keep traces
      rlk-diff infer traces/rollout-vllm --boundary layers.0.input_layernorm
      rlk-diff infer traces/train-megatron --boundary layers.0.self_attn.attention --budget 120

    Exit codes: 0 at least one contract fits, 2 usage or environment error, 3 not the traced weights, 4 inconclusive.
    """
    from diffcheck.infer.explain import infer as run_inference
    from diffcheck.infer.model import find_model
    from diffcheck.infer.report import print_inference
    from diffcheck.trace.reader import Trace

    if json_out:
        check_writable(json_out)
    with ProgressLine(Terminal(stderr=True)) as progress:
        opened = Trace(trace)
        folder = find_model(opened.header, model, lambda text: progress(text, 0, 0))
        answer = run_inference(opened, boundary, folder, rows=rows, budget=budget, progress=progress)
    if json_out:
        write_json(json_out, answer.to_json())
    if json_out != STANDARD_OUTPUT:
        print_inference(answer.to_json(), Terminal())
    raise typer.Exit(ExitCode.EQUAL if answer.status == "match" else ExitCode.INCONCLUSIVE)
