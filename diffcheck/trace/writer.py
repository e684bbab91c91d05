"""Write a trace folder atomically: everything goes to a hidden neighbour that takes the final name only when
complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from diffcheck.base.bits import UIntArray, digest_of_rows, row_digests
from diffcheck.base.errors import TraceError
from diffcheck.base.files import disk_error
from diffcheck.trace.schema import ALWAYS_STORED, HEADER, BoundaryEntry, Header
from reference.files import to_disk

#: Patterns buffered before a tensor file is closed, so that a full trace of any size needs little memory.
FLUSH_BYTES = 128 << 20


class TraceWriter:
    """Collects boundaries of one rank and writes them as ``rank<r>-<part>.safetensors``.

    Args:
        folder: final name; must not exist, or be a trace when ``overwrite``.

    Raises:
        TraceError: ``folder`` exists and may not be replaced, or cannot be written.
    """

    def __init__(self, folder: Path, level: str, *, rank: int = 0, overwrite: bool = False) -> None:
        if folder.exists() and not (overwrite and (folder / HEADER).is_file()):
            raise TraceError(f"{folder}: already exists", "give another --out, or --overwrite to replace a trace")
        self.folder = folder
        self.level = level
        self.rank = rank
        self._staging = folder.with_name(f"{_staging_prefix(folder)}{os.getpid()}")
        shutil.rmtree(self._staging, ignore_errors=True)
        try:
            self._staging.mkdir(parents=True)
        except OSError as error:
            raise TraceError(f"{folder}: {error.strerror}", "choose a folder that can be written") from None
        self._tensors: dict[str, npt.NDArray[Any]] = {}
        self._entries: dict[str, BoundaryEntry] = {}
        self._files: dict[str, str] = {}
        self._buffered = 0

    def put(self, name: str, bits: UIntArray, dtype: str, stored: npt.NDArray[np.int64] | None = None) -> None:
        """Add a whole boundary: patterns [rows, width] in logical order.

        Args:
            stored: at level "sampled", the row numbers whose patterns are kept.
        """
        digests = row_digests(bits, dtype)
        values: UIntArray | None = bits
        if name in ALWAYS_STORED:
            stored = None
        elif self.level == "digest":
            values = None
        elif stored is not None:
            values = bits[stored]
        self.put_digests(name, digests, dtype, bits.shape[1], values, stored)

    def put_digests(
        self,
        name: str,
        digests: npt.NDArray[np.uint8],
        dtype: str,
        width: int,
        values: UIntArray | None = None,
        stored: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Add a boundary of which the row digests [rows, 32] are known already."""
        self._tensors[f"{name}#digests"] = digests
        level = "digest"
        if values is not None:
            level = "full" if stored is None else "sampled"
            self._tensors[name] = np.ascontiguousarray(values)
            if stored is not None:
                self._tensors[f"{name}#rows"] = stored
            self._buffered += values.nbytes
        self._entries[name] = BoundaryEntry(
            dtype, (digests.shape[0], width), digest_of_rows(digests), level, self._part_name()
        )
        if self._buffered >= FLUSH_BYTES:
            self._flush()

    def finish(self, header: Header) -> None:
        """Write ``trace.json`` and give the folder its final name. The header's boundaries and files are filled in
        here.
        """
        self._flush()
        header.boundaries = dict(self._entries)
        header.files = dict(self._files)
        try:
            (self._staging / HEADER).write_text(header.to_json())
            for path in (*self._staging.iterdir(), self._staging):
                to_disk(path)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self._staging.rename(self.folder)
            to_disk(self.folder.parent)
        except OSError as error:
            self.abort()
            raise TraceError(*disk_error(error, self.folder)) from None

    def abort(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self._staging, ignore_errors=True)

    def _part_name(self) -> str:
        return f"rank{self.rank}-{len(self._files):05d}.safetensors"

    def _flush(self) -> None:
        if not self._tensors:
            return
        path = self._staging / self._part_name()
        try:
            save_file(self._tensors, path)
        except (OSError, SafetensorError) as error:
            self.abort()
            raise TraceError(*disk_error(error, self.folder / path.name)) from None
        self._files[path.name] = file_sha256(path)
        self._tensors, self._buffered = {}, 0


def _staging_prefix(folder: Path) -> str:
    return f".{folder.name}.partial-"


def remove_staging(folder: Path) -> None:
    """Remove what a killed writer of ``folder`` left."""
    if folder.parent.is_dir():
        for path in folder.parent.iterdir():
            if path.name.startswith(_staging_prefix(folder)):
                shutil.rmtree(path, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
