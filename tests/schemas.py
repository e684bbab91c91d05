"""Hold a document to its JSON Schema (diffcheck/schemas)."""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from diffcheck import schemas


@cache
def _validator(name: str) -> Draft202012Validator:
    every = [schemas.read(known) for known in schemas.names()]
    registry: Registry[Any] = Registry().with_resources([(s["$id"], Resource.from_contents(s)) for s in every])
    return Draft202012Validator(schemas.read(name), registry=registry)


def faults(name: str, document: Any) -> list[str]:
    """Where ``document`` departs from schema ``name``, one line each."""
    found = _validator(name).iter_errors(document)
    return [f"{e.json_path}: {e.message[:200]}" for e in found]


def conforms(name: str, document: Any) -> None:
    """Raises:
    AssertionError: the document is not what the schema says.
    """
    assert not (found := faults(name, document)), (name, found[:5])
