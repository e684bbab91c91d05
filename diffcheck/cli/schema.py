"""``rlk-diff schema``: the JSON Schemas of all files and outputs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from diffcheck import schemas
from diffcheck.base.console import Terminal, listing


def schema(name: Annotated[str | None, typer.Argument(help="A schema; without it all are listed.")] = None) -> None:
    """Print the JSON Schema of a file format or of a --json output.

    [bold]Examples[/bold]

      rlk-diff schema
      rlk-diff schema verdict > verdict.schema.json
    """
    if name is not None:
        typer.echo(json.dumps(schemas.read(name), indent=1, ensure_ascii=False))
        return
    table = listing("name", "what it describes")
    for known in schemas.names():
        table.add_row(known, schemas.read(known)["title"])
    Terminal().print_list(table)
