"""The file of the data buffer: opened, locked for its one writer, and every fault of SQLite explained."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from diffcheck.base.errors import RlkError
from integration.grpo.buffer.schema import SCHEMA, VERSION

_REMEDY = {
    sqlite3.SQLITE_FULL: "free some space, then resume: what was written is intact",
    sqlite3.SQLITE_IOERR: "free some space or check the disk, then resume: what was written is intact",
    sqlite3.SQLITE_READONLY: "make the file and its folder writable, or choose another output folder",
    sqlite3.SQLITE_CANTOPEN: "make the folder exist and writable, or choose another output folder",
    sqlite3.SQLITE_BUSY: "another process holds it: wait for it, or stop it",
    sqlite3.SQLITE_CORRUPT: "restore the file from a copy, or start the run in another folder",
    sqlite3.SQLITE_NOTADB: "restore the file from a copy, or start the run in another folder",
}


class DataBufferError(RlkError):
    """The buffer's file is unusable, or a sample was asked to go where its state does not lead."""


class BufferFile:
    """An open buffer. Use `open`; close it, or use it as a context."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: IO[bytes] | None) -> None:
        self.path = path
        self._connection = connection
        self._lock = lock

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Self:
        """Open the buffer at ``path``; a writer makes it where there is none.

        Raises:
            DataBufferError: it cannot be opened, is no buffer of this version, is damaged, or has a writer already.
        """
        lock = None
        try:
            if read_only:
                connection = _connect_reader(path)
            else:
                lock = _lock_writer(path)
                connection = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise _explained(path, error) from None
        buffer = cls(path, connection, lock)
        try:
            buffer._prepare(read_only)
        except BaseException:
            buffer.close()
            raise
        return buffer

    def close(self) -> None:
        self._connection.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, read_only: bool) -> None:
        db = self._connection
        with self._errors():
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if version != VERSION and (tables or read_only):
                raise DataBufferError(
                    f"{self.path}: no data buffer of version {VERSION}",
                    "name another file, or use its release",
                )
            if read_only:
                return
            db.execute("PRAGMA journal_mode = WAL")
            # A checkpoint on disk may rely on its samples: no commit returns before it would survive a power cut.
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA foreign_keys = ON")
            if not tables:
                with self._transaction():
                    for statement in SCHEMA:
                        db.execute(statement)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _explained(self.path, error) from None

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        with self._errors():
            self._connection.execute(f"BEGIN {kind}")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself where the disk was full.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


def _lock_writer(path: Path) -> IO[bytes]:
    """Hold the lock that the kernel takes back from a process that dies. A file of its own: closing any descriptor of
    the database would drop SQLite's locks."""
    place = path.with_name(f".{path.name}.lock")
    try:
        lock = place.open("ab")
    except OSError as error:
        raise DataBufferError(f"{path}: {error.strerror}", _REMEDY[sqlite3.SQLITE_CANTOPEN]) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise DataBufferError(f"{path}: another run is writing it", _REMEDY[sqlite3.SQLITE_BUSY]) from None
    return lock


def _connect_reader(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise DataBufferError(f"{path}: no such file", "name the output folder of a run")
    # Without a journal nobody is writing. Told so, SQLite leaves no files beside it, and reads a read-only folder.
    still = not path.with_name(f"{path.name}-wal").exists()
    uri = path.absolute().as_uri() + ("?immutable=1" if still else "?mode=ro")
    return sqlite3.connect(uri, uri=True, isolation_level=None)


def _explained(path: Path, error: sqlite3.Error) -> DataBufferError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return DataBufferError(f"{path}: {error}", _REMEDY.get(code, "restore the file from a copy, or use another folder"))
