"""Atomic writing of small output files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from diffcheck.base.documents import DocumentError, parse_json, read_bounded
from diffcheck.base.errors import InputError
from reference.files import write_atomically

#: What stands for standard output where a file could be named.
STANDARD_OUTPUT = Path("-")


def check_writable(path: Path) -> None:
    """Fail before the work, not after it. Standard output can be written.

    Raises:
        InputError: the folder of ``path`` is missing or read-only.
    """
    if path == STANDARD_OUTPUT:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{path}: folder {folder} does not exist", "create it, or choose another place")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{path}: cannot be written", "choose another place")


def read_lines(path: Path, limit: int) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each line of a file of JSON lines; blank ones are skipped.

    Raises:
        InputError: the file cannot be read or is larger than ``limit`` bytes, or a line is no JSON; it is named.
    """
    try:
        text = read_bounded(path, limit)
    except DocumentError as error:
        raise InputError(f"{path}: {error}", "split the file") from None
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            data = parse_json(line, literals=True)
        except DocumentError as error:
            raise InputError(f"{path}:{number}: {error}", "one JSON object a line, in UTF-8") from None
        yield number, data


class Told(NamedTuple):
    """What a user is told of a fault."""

    cause: str
    remedy: str


def disk_error(error: Exception, path: Path | None = None) -> Told:
    """Cause and remedy of what a file system refused, with the file where it is known."""
    where = path or getattr(error, "filename", None) or "a file"
    what = getattr(error, "strerror", None) or str(error).partition("I/O error: ")[2] or str(error)
    return Told(f"{where}: {what}", "free some space, or choose a place that can be written")


def write_json(path: Path, data: Any) -> None:
    """Write plain data as JSON to a file, or to standard output for ``-``.

    Raises:
        InputError: see `write_text`.
    """
    text = json.dumps(data, indent=1) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` so that readers see the old file or the new one, never half of it.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "free some space, or choose another place") from None
