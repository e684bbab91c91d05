"""JSON from outside: bounded in size and depth, every key once, numbers that are numbers. Types are its reader's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MIB = 1 << 20


class DocumentError(ValueError):
    """The text is no document that this project would write; the message says what is wrong with it."""


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a file.

    Raises:
        DocumentError: it is no plain file, larger than ``limit`` bytes, or cannot be read.
    """
    try:
        if not path.is_file():
            raise DocumentError("no such file")
        if (size := path.stat().st_size) > limit:
            raise DocumentError(f"{size:,} bytes, more than the {limit:,} that such a file can have")
        return path.read_bytes()
    except OSError as error:
        raise DocumentError(error.strerror or str(error)) from None


def parse_json(text: bytes | str, *, literals: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        literals: let NaN and Infinity pass, which Python writes and JSON does not have.

    Raises:
        DocumentError: not JSON, not UTF-8, a key that comes twice, NaN or Infinity, or too deeply nested.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        return json.loads(decoded, object_pairs_hook=_once, parse_constant=float if literals else _no_number)
    except json.JSONDecodeError as error:
        raise DocumentError(f"not valid JSON ({error.msg}, line {error.lineno})") from None
    except UnicodeDecodeError as error:
        raise DocumentError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise DocumentError("nested too deeply") from None
    except DocumentError:
        raise
    except ValueError as error:
        raise DocumentError(f"not valid JSON ({error})") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DocumentError(f"key {twice!r} comes twice")
    return found


def _no_number(literal: str) -> Any:
    raise DocumentError(f"{literal} is not JSON")


def finite(value: Any) -> Any:
    """``value`` with infinities and NaN as the texts "inf", "-inf" and "nan", so that any parser reads it."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
