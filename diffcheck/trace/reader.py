"""Read a trace folder: every file and field is checked, values are streamed by rows and verified against their
digests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from diffcheck.base.bits import DIGEST_BYTES, UIntArray, digest_of_rows, row_digests, uint_type
from diffcheck.base.documents import DocumentError, read_bounded
from diffcheck.base.errors import TraceError
from diffcheck.trace.door import check_folder
from diffcheck.trace.schema import HEADER, HEADER_LIMIT, UNSEALED, BoundaryEntry, Header
from diffcheck.trace.writer import file_sha256

_REMEDY = "the trace is damaged: copy it again, or capture it again"
#: Patterns read at a time from one boundary. Small enough for the processor's cache: comparing is bound by memory
#: traffic.
_BLOCK_BYTES = 1 << 20
#: Files whose digest was checked by this process: traces are opened again and again.
_verified: set[tuple[str, int, int, int, str]] = set()


class Trace:
    """An opened trace. Nothing but the header is held in memory.

    Raises:
        TraceError: the folder is missing, foreign, of another schema, or a file is missing or truncated; file and field
            are named.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / HEADER
        if not folder.is_dir():
            raise TraceError(f"{folder}: no such trace folder", "give a folder that rlk-diff capture wrote")
        if not path.is_file():
            raise TraceError(f"{path}: missing: not a trace folder", "give a folder that rlk-diff capture wrote")
        if path.is_symlink():
            raise TraceError(f"{path}: is a link, which may lead out of the trace's folder", "copy the file itself")
        try:
            text = read_bounded(path, HEADER_LIMIT)
        except DocumentError as error:
            raise TraceError(f"{path}: {error}", _REMEDY) from None
        self.header = Header.from_json(text, str(path))
        check_folder(folder, self.header)
        #: What a reader should know of the trace, besides what it says.
        self.warnings: list[str] = []
        if self.header.schema == UNSEALED:
            self.warnings.append(
                f"{folder}: of schema {UNSEALED}, whose header has no digest: damage there goes unseen"
            )
        # One file is held open at a time, and the digests of one boundary: what a pass over the boundaries needs.
        self._open_file: tuple[str, Any] | None = None
        self._last_digests: tuple[str, npt.NDArray[np.uint8]] | None = None

    def entry(self, boundary: str) -> BoundaryEntry:
        return self.header.boundaries[boundary]

    def __contains__(self, boundary: str) -> bool:
        return boundary in self.header.boundaries

    def digests(self, boundary: str) -> npt.NDArray[np.uint8]:
        """SHA-256 of each row: [rows, 32], checked against the header.

        Raises:
            TraceError: missing, of the wrong shape, or not the digest the header promises.
        """
        if self._last_digests is not None and self._last_digests[0] == boundary:
            return self._last_digests[1]
        entry = self.entry(boundary)
        digests: npt.NDArray[np.uint8] = self._tensor(boundary, "#digests")
        if digests.dtype != np.uint8 or digests.shape != (entry.shape[0], DIGEST_BYTES):
            raise self._damaged(boundary, f"digests of shape {digests.shape} for {entry.shape[0]} rows")
        if digest_of_rows(digests) != entry.sha256:
            raise self._damaged(boundary, "sha256 does not match its row digests")
        self._last_digests = (boundary, digests)
        return digests

    def stored_rows(self, boundary: str) -> npt.NDArray[np.int64] | None:
        """Row numbers whose patterns are stored; None where all are (level full).

        Raises:
            TraceError: see `digests`.
        """
        entry = self.entry(boundary)
        if entry.level == "full":
            return None
        if entry.level == "digest":
            return np.empty(0, np.int64)
        rows: npt.NDArray[np.int64] = self._tensor(boundary, "#rows")
        if (
            rows.dtype != np.int64
            or rows.ndim != 1
            or (rows.size and not 0 <= rows.min() <= rows.max() < entry.shape[0])
        ):
            raise self._damaged(boundary, "stored row numbers out of range")
        return rows

    def block_rows(self, boundary: str) -> int:
        """Rows that make a block of about 1 MiB."""
        entry = self.entry(boundary)
        return max(1, _BLOCK_BYTES // max(1, entry.shape[1] * np.dtype(uint_type(entry.dtype)).itemsize))

    def row(self, boundary: str, row: int) -> UIntArray | None:
        """Patterns of one row, [1, width], or None where they are not stored.

        Raises:
            TraceError: see `blocks`.
        """
        stored = self.stored_rows(boundary)
        at = np.array([row]) if stored is None else np.flatnonzero(stored == row)
        if not at.size:
            return None
        bits: UIntArray = self._open(boundary).get_slice(boundary)[int(at[0]) : int(at[0]) + 1]
        return bits

    def blocks(self, boundary: str, step: int | None = None) -> Iterator[tuple[npt.NDArray[np.int64], UIntArray]]:
        """Stored patterns in blocks of ``step`` rows: (row numbers, patterns [block, width]), each verified against its
        row digests.

        Raises:
            TraceError: truncated, of the wrong type or shape, or bits that do not match their digest (row named).
        """
        entry = self.entry(boundary)
        if entry.level == "digest":
            return
        digests = self.digests(boundary)
        stored = self.stored_rows(boundary)
        rows = np.arange(entry.shape[0]) if stored is None else stored
        step = step or self.block_rows(boundary)
        try:
            view = self._open(boundary).get_slice(boundary)
            if tuple(view.get_shape()) != (rows.size, entry.shape[1]):
                raise self._damaged(
                    boundary, f"stored shape {tuple(view.get_shape())} for {(rows.size, entry.shape[1])}"
                )
            for start in range(0, rows.size, step):
                bits = view[start : min(start + step, rows.size)]
                block = rows[start : start + step]
                self.check_rows(boundary, block, bits, digests)
                yield block, bits
        except SafetensorError as error:
            raise self._damaged(boundary, str(error)) from None

    def values(self, boundary: str) -> UIntArray:
        """All stored patterns at once: [stored rows, width]."""
        entry = self.entry(boundary)
        parts = [bits for _, bits in self.blocks(boundary)]
        return np.concatenate(parts) if parts else np.empty((0, entry.shape[1]), uint_type(entry.dtype))

    def slice(self, boundary: str, start: int, stop: int) -> UIntArray:
        """Stored patterns as they lie in the file, [start, stop); not verified: see `check_rows`.

        Raises:
            TraceError: truncated or unreadable.
        """
        try:
            bits: UIntArray = self._open(boundary).get_slice(boundary)[start:stop]
        except SafetensorError as error:
            raise self._damaged(boundary, str(error)) from None
        return bits

    def check_rows(
        self, boundary: str, rows: npt.NDArray[np.int64], bits: UIntArray, digests: npt.NDArray[np.uint8]
    ) -> None:
        """Verify patterns [block, width] of ``rows`` against the digests of all rows.

        Raises:
            TraceError: of the wrong type, or bits that do not match their digest (row named).
        """
        dtype = self.entry(boundary).dtype
        if bits.dtype != uint_type(dtype):
            raise self._damaged(boundary, f"stored as {bits.dtype}, expected {np.dtype(uint_type(dtype))}")
        wrong = (row_digests(bits, dtype) != digests[rows]).any(axis=1)
        if wrong.any():
            raise self._damaged(boundary, f"row {int(rows[wrong][0])} does not match its digest")

    def _tensor(self, boundary: str, suffix: str) -> Any:
        try:
            return self._open(boundary).get_tensor(boundary + suffix)
        except SafetensorError as error:
            raise self._damaged(boundary, str(error)) from None

    def _open(self, boundary: str) -> Any:
        name = self.entry(boundary).file
        if self._open_file is None or self._open_file[0] != name:
            try:
                opened = safe_open(self.folder / name, framework="numpy")
                # After opening, which refuses a file whose size is not what its tensors need.
                self._verify(name)
            except (SafetensorError, OSError) as error:
                raise self._damaged(boundary, str(error)) from None
            self._open_file = (name, opened)
        return self._open_file[1]

    def _verify(self, name: str) -> None:
        """Check a file's digest, once for each state of the file."""
        path = self.folder / name
        state = path.stat()
        seen = (str(path.absolute()), state.st_mtime_ns, state.st_size, state.st_ino, self.header.files[name])
        if seen in _verified:
            return
        if file_sha256(path) != self.header.files[name]:
            raise TraceError(f"{path}: sha256 is not that of 'files' in {HEADER}", _REMEDY)
        _verified.add(seen)

    def _damaged(self, boundary: str, what: str) -> TraceError:
        return TraceError(f"{self.folder / self.entry(boundary).file}: boundary {boundary}: {what}", _REMEDY)
