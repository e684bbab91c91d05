"""JSON Schemas (2020-12) of every file and JSON output: what a reader in another language can rely on.

``<name>.schema.json`` beside this file; docs/formats.md says what each describes. The tests hold real outputs to them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError
from reference.contract.names import offered

_FOLDER = Path(__file__).parent
_SUFFIX = ".schema.json"


def names() -> list[str]:
    """Names of all schemas, sorted."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in _FOLDER.glob(f"*{_SUFFIX}"))


def read(name: str) -> dict[str, Any]:
    """The schema ``name`` as plain data. Its ``$id`` is ``urn:rlk:<name>:<version>``; others are referred to by it.

    Raises:
        InputError: there is none of that name.
    """
    if name not in names():
        raise InputError(f"schema {name!r} is unknown", offered(name, names()))
    found: dict[str, Any] = json.loads((_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8"))
    return found
