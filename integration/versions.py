"""Which releases of an engine the strict path knows, and the changes to an engine that no extension point allows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class UnknownVersionError(RuntimeError):
    """The installed release of an engine is not one that the strict path was made for."""


@dataclass(frozen=True)
class Patch:
    """One attribute of an engine that is replaced while a strict profile is on."""

    #: A module, or a class in one.
    module: str
    attribute: str
    #: Release series in which it was read and tested.
    versions: tuple[str, ...]
    #: Why no public extension point does.
    why: str
    #: ``make(original)`` is what takes its place.
    make: Callable[[Any], Any]

    def describe(self) -> dict[str, Any]:
        return {"target": f"{self.module}.{self.attribute}", "versions": list(self.versions), "why": self.why}


def check_version(engine: str, found: str, known: Sequence[str]) -> None:
    """Raises:
    UnknownVersionError: ``found`` is of no release series in ``known``.
    """
    if ".".join(found.split(".")[:2]) not in known:
        listed = ", ".join(f"{series}.x" for series in known)
        raise UnknownVersionError(
            f"the strict path of {engine} is made for {listed}, found {found}: "
            f"install one of these releases, or unset RLK_PROFILE to run {engine} natively"
        )


def _owner(path: str) -> Any:
    """A module, or a class of one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name, None)


def apply_patches(engine: str, found: str, patches: Sequence[Patch]) -> None:
    """Apply ``patches``, all of them or, where one does not fit, none. A patch is applied once.

    Raises:
        UnknownVersionError: a patch is not known to fit the release ``found``, or its target is not there.
    """
    owners = []
    for patch in patches:
        check_version(engine, found, patch.versions)
        owner = _owner(patch.module)
        if not hasattr(owner, patch.attribute):
            raise UnknownVersionError(f"{engine} {found} has no {patch.module}.{patch.attribute} to replace")
        owners.append(owner)
    for owner, patch in zip(owners, patches, strict=True):
        original = getattr(owner, patch.attribute)
        if not hasattr(original, "rlk_original"):
            replacement = patch.make(original)
            replacement.rlk_original = original
            setattr(owner, patch.attribute, replacement)
