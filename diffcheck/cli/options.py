"""What every command takes: ``--quiet``, ``--version``, and ``--config FILE.toml`` in place of a long command line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from diffcheck.base import progress
from diffcheck.base.errors import InputError
from diffcheck.capture.adapter import own_version
from reference.contract.names import offered

#: Options that say where others are found, or end the command.
_NOT_IN_FILES = {"config", "help", "version"}


def take_config(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of ``--config``: the file's values become the command's defaults, so that the command line wins.

    Raises:
        InputError: no such file, no TOML, no such option, or a value of another type; it is named.
    """
    if path is not None:
        context.default_map = {**(context.default_map or {}), **read_options(path, context.command)}
    return path


def take_config_for(context: typer.Context, path: Path) -> None:
    """``rlk-diff --config FILE COMMAND``: the same before the name of any command.

    Raises:
        InputError: see `take_config`; or a command that only holds others.
    """
    name = str(context.invoked_subcommand)
    command = context.command.get_command(context, name)  # type: ignore[attr-defined]
    if command is None or hasattr(command, "commands"):
        raise InputError(f"--config {path}: {name} has no options of its own", "give it to a command that has")
    context.default_map = {**(context.default_map or {}), name: read_options(path, command)}


def _take_quiet(quiet: bool) -> bool:
    if quiet:
        progress.set_quiet(True)
    return quiet


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rlk {own_version()}")
        raise typer.Exit


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        is_eager=True,
        callback=take_config,
        help="Options from a file, one to one; those given here win.",
    ),
]
Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Say which rlk this is.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", callback=_take_quiet, help="No progress, and of a verdict one line.")
]


def read_options(path: Path, command: Any) -> dict[str, Any]:
    """The options of ``command`` that the TOML file at ``path`` gives, by parameter.

    Raises:
        InputError: see `take_config`.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else f"is no text: {error}"
        raise InputError(f"--config {path}: {cause}", "give an existing TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"--config {path}: not valid TOML: {error}", "write option = value, a line each") from None
    known = {
        name.lstrip("-"): parameter
        for parameter in command.params
        for name in parameter.opts
        if name.startswith("--") and parameter.name not in _NOT_IN_FILES
    }
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("_", "-")
        if name not in known:
            raise InputError(f"--config {path}: {command.name} has no option {key!r}", offered(name, known))
        parameter = known[name]
        if parameter.name in found:
            raise InputError(f"--config {path}: {key!r} is given twice", "write it once, with dashes")
        if (expected := _expected(parameter, value)) is not None:
            raise InputError(f"--config {path}: {key} = {value!r} is not {expected}", "see --help for what it takes")
        found[parameter.name] = value
    return found


def _expected(parameter: Any, value: Any) -> str | None:
    """What ``value`` should have been; None if it will do. What a text may be is judged where the command line's is."""
    if parameter.is_flag:
        return None if isinstance(value, bool) else "true or false"
    if parameter.multiple or parameter.nargs != 1:
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return None if texts else "a list of texts"
    # typer's own description, or that of click in releases that stand on it.
    kind = (
        parameter.type_descriptor.annotation.__name__ if hasattr(parameter, "type_descriptor") else parameter.type.name
    )
    if "int" in kind:
        return None if type(value) is int else "an integer"
    if "float" in kind:
        return None if type(value) in (int, float) else "a number"
    return None if isinstance(value, str) else "a text"
