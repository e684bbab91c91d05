"""Ratios of the arms that `integration.measure.vllm_speed` measured: ``python -m integration.measure.ratios FILES``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from integration.measure.machine import write

app = typer.Typer(add_completion=False)


@app.command()
def main(
    files: Annotated[list[Path], typer.Argument(help="Results of the arms, of one machine.")],
    out: Annotated[Path, typer.Option(help="JSON to write.")],
) -> None:
    """Put the arms side by side."""
    arms: dict[str, Any] = {found["arm"]: found for found in (json.loads(file.read_text()) for file in files)}
    ratios: dict[str, Any] = {}
    for peer in ("native", "invariant"):
        if peer not in arms or "strict" not in arms:
            continue
        for n in [key for key in arms["strict"] if key.isdigit() and key in arms[peer]]:
            for what in ("prefill_tok_s", "decode_tok_s"):
                ratios[f"{what} strict over {peer}, {n} sequences"] = round(
                    arms["strict"][n][what] / arms[peer][n][what], 3
                )
    for name, value in ratios.items():
        typer.echo(f"{name}: {value}")
    write(out, {"ratios": ratios, "arms": arms})


if __name__ == "__main__":
    app()
