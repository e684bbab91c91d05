"""Checkpoints: a folder a step, complete or not there, and never trusted without its digests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.trace.writer import file_sha256
from reference.files import to_disk

MANIFEST = "checkpoint.json"
SCHEMA = 1


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are those that were written."""

    step: int
    folder: Path
    #: What the run noted with it.
    facts: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def stage(self, step: int) -> Path:
        """An empty folder to write the state of ``step`` into; `commit` makes it a checkpoint.

        Raises:
            InputError: it cannot be made.
        """
        staging = self._folder / f".step-{step:06d}"
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        except OSError as error:
            raise _unwritable(staging, error) from None
        return staging

    def commit(self, step: int, facts: dict[str, Any]) -> None:
        """Note ``facts`` (JSON) and every file's digest, give the staged folder its name, and remove old checkpoints.

        Raises:
            InputError: the disk is full, or the folder cannot be written.
        """
        staging, final = self._folder / f".step-{step:06d}", self._path(step)
        try:
            files = {path.name: file_sha256(path) for path in sorted(staging.iterdir())}
            manifest = {"schema": SCHEMA, "step": step, "files": files, "facts": facts}
            (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in (*staging.iterdir(), staging):
                to_disk(path)
            # Of a run that was set back to before it.
            shutil.rmtree(final, ignore_errors=True)
            staging.rename(final)
            to_disk(self._folder)
        except OSError as error:
            raise _unwritable(final, error) from None
        for old in self._steps()[self._keep :]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def newest(self, announce: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole; ``announce`` is told of each that is not."""
        for step in self._steps():
            try:
                return self._read(step)
            except InputError as error:
                announce(f"{error.cause}: falling back to the checkpoint before")
        return None

    def forget_after(self, step: int) -> None:
        """Remove checkpoints of steps that the run was set back to before."""
        for later in self._steps():
            if later > step:
                shutil.rmtree(self._path(later), ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def _steps(self) -> list[int]:
        """Steps with a folder, newest first."""
        found = [path.name.removeprefix("step-") for path in self._folder.glob("step-*") if path.is_dir()]
        return sorted((int(name) for name in found if name.isdigit()), reverse=True)

    def _read(self, step: int) -> Checkpoint:
        folder = self._path(step)
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            files, facts, schema, of = (manifest[key] for key in ("files", "facts", "schema", "step"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder / MANIFEST}: damaged: {type(error).__name__}") from None
        if (schema, of) != (SCHEMA, step):
            raise InputError(f"{folder / MANIFEST}: of schema {schema} and step {of}, not {SCHEMA} and {step}")
        for name, digest in files.items():
            path = folder / name
            if not path.is_file() or file_sha256(path) != digest:
                raise InputError(f"{path}: {'damaged' if path.is_file() else 'missing'}")
        return Checkpoint(step, folder, facts)


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: {error.strerror}", "free some space, or make the folder writable; then resume")
