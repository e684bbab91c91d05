"""Scores that an unfinished search has found, kept on disk: run again, it goes on where it was stopped.

A journal is a file of JSON lines in the cache folder, named by the question: the traced bits and object, the boundary,
the space, the rows looked at, and the code that computes. Lines are only appended, and a torn last one does not count,
so that even a killed process leaves a good journal. A search that comes to its end removes it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

import reference
from diffcheck.base.models import cache_folder
from diffcheck.infer.candidates import Candidates
from diffcheck.infer.trial import Score, Trial
from diffcheck.trace.reader import Trace
from reference.contract import Contract

#: Seconds between writes, and before the first: quick searches leave no trace on the disk.
_EVERY = 2.0
#: Journals that nobody came back to are removed after this many seconds.
_FORGET = 30 * 24 * 3600.0


class Journal:
    """The scores of one trial.

    Losing a journal costs time and nothing else, so a folder that cannot be written, or another process that keeps the
    same journal, means that nothing is kept.
    """

    def __init__(self, trace: Trace, trial: Trial, candidates: Candidates) -> None:
        self._trial = trial
        self._paths = list(candidates.axes)
        self._codes = [{value: i for i, value in enumerate(values)} for values in candidates.axes.values()]
        self._path = cache_folder() / "infer" / f"{_key(trace, trial, candidates)}.jsonl"
        self._stream: IO[str] | None = None
        self._lines: list[str] = []
        self._written = time.monotonic()
        self._broken = False
        self._scores: dict[tuple[int, ...], Score | None] = {}
        #: Bytes of whole lines in the file.
        self._good = 0
        self._read()

    def get(self, contract: Contract, depth: int) -> Score | None:
        """What `Trial.at` gives; computed if it is not known yet."""
        key = depth, *self._code(contract)
        if key not in self._scores:
            score = self._trial.at(contract, depth)
            self._scores[key] = score
            self._lines.append(json.dumps([*key, *(() if score is None else _numbers(score))]))
            if time.monotonic() - self._written > _EVERY:
                self.flush()
        return self._scores[key]

    def flush(self) -> None:
        """Write what is known."""
        self._written = time.monotonic()
        if self._broken or not self._lines:
            return
        try:
            if self._stream is None:
                self._stream = self._open()
            self._stream.write("\n".join(self._lines) + "\n")
            self._stream.flush()
            self._lines.clear()
        except OSError:
            self._broken = True

    def close(self, *, finished: bool) -> None:
        """Remove the journal of a finished search; keep that of a stopped one."""
        if not finished:
            self.flush()
        elif self._path.exists() and not self._broken:
            with suppress(OSError):
                self._path.unlink()
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _code(self, contract: Contract) -> Sequence[int]:
        return [codes[contract.get(path)] for path, codes in zip(self._paths, self._codes, strict=True)]

    def _open(self) -> IO[str]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for old in self._path.parent.glob("*.jsonl"):
            if time.time() - old.stat().st_mtime > _FORGET:
                old.unlink(missing_ok=True)
        stream = self._path.open("a", encoding="utf-8")
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stream.truncate(self._good)
        return stream

    def _read(self) -> None:
        """Whole lines up to the first that is not one."""
        size = 1 + len(self._paths)
        sizes = (size, size + len(_numbers(Score(0, 0))))
        with suppress(OSError):
            for line in self._path.read_bytes().splitlines(keepends=True):
                try:
                    numbers = [int(n) for n in json.loads(line)]
                except (ValueError, TypeError):
                    break
                if not line.endswith(b"\n") or len(numbers) not in sizes:
                    break
                self._scores[tuple(numbers[:size])] = Score(*numbers[size:]) if len(numbers) > size else None
                self._good += len(line)


def _numbers(score: Score) -> tuple[int, ...]:
    return score.elements, score.matching, score.max_ulp, score.rows_failing


def _key(trace: Trace, trial: Trial, candidates: Candidates) -> str:
    """SHA-256 of everything that a score depends on."""
    header, site = trace.header, trial.site
    question = {
        "object": asdict(header.object),
        "samples": header.samples,
        "how": [header.dtype, header.phase, header.tensor_parallel],
        "bits": {name: entry.sha256 for name, entry in header.boundaries.items()},
        "boundary": site.boundary,
        "base": candidates.base.contract_id,
        "axes": {path: list(values) for path, values in candidates.axes.items()},
        "facts": {name: _plain(value) for name, value in site.arguments.facts.items()},
        "rows": [_digest(site.rows), *(_digest(x) for level in trial.levels for x in (level.rows, level.columns))],
        "code": code_version(),
    }
    return hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    return value.contract_id if isinstance(value, Contract) else value


def _digest(array: np.ndarray[Any, Any] | None) -> str:
    return "" if array is None else hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@functools.cache
def code_version() -> str:
    """SHA-256 of the source that scores depend on: the reference, and inference."""
    state = hashlib.sha256()
    for folder in (Path(reference.__path__[0]), Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            state.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return state.hexdigest()


__all__ = ["Journal", "code_version"]
