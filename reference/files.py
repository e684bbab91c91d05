"""Files that are whole or not there: the one place where every floor writes them."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` so that readers see the old file or the new one, never half of it, and a crash loses neither.

    Raises:
        OSError: the disk is full or the folder cannot be written; nothing is left behind.
    """
    folder = path.absolute().parent
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    to_disk(folder)


def to_disk(path: Path) -> None:
    """Make a file's content, or a folder's list of names, outlive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
