"""Runs a subject over all 2^32 bit patterns, in shards that survive an interruption."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tests.reference.exhaustive.domains import domain
from tests.reference.exhaustive.subjects import SUBJECTS, Outcome

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "build" / "exhaustive"
SHARDS = 64
CHUNK = 1 << 20
#: A result counts only for the code it was computed with: of a cast, and of a primitive.
ORACLE = tuple(f"tests/reference/exhaustive/{name}" for name in ("oracle.c", "subjects.py"))
CAST_SOURCES = ("reference/formats.py", "reference/rounding.py", *ORACLE)
PRIMITIVES = ("elementwise", "exp", "exp2", "exp2_nonpositive", "log", "rsqrt", "sigmoid", "silu", "correctly_rounded")
PRIMITIVE_SOURCES = ("reference/arithmetic.py", *(f"reference/primitives/{name}.py" for name in PRIMITIVES), *ORACLE)


@dataclass
class Shard:
    """Result of one subject on one 64th of the bit patterns."""

    subject: str
    shard: int
    sources: str
    seconds: float
    outcome: Outcome


def sources_digest(subject: str) -> str:
    """SHA-256 over the code that a subject depends on; comments and docstrings of Python files do not count."""
    digest = hashlib.sha256(repr(domain(subject)).encode())
    for name in CAST_SOURCES if subject.startswith("cast/") else PRIMITIVE_SOURCES:
        source = (ROOT / name).read_text()
        digest.update(f"{name}\0{_code(source) if name.endswith('.py') else source}\0".encode())
    return digest.hexdigest()


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def stored(subject: str, shard: int, digest: str, results: Path = RESULTS) -> Shard | None:
    """The result on disk, if it was computed with the same sources."""
    path = _path(subject, shard, results)
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    if record["sources"] != digest:
        return None
    return Shard(**{**record, "outcome": Outcome(**record["outcome"])})


def run_shard(subject: str, shard: int, digest: str, results: Path = RESULTS) -> Shard:
    """The result on disk, or a new one, which is then written atomically."""
    known = stored(subject, shard, digest, results)
    if known:
        return known
    size = (1 << 32) // SHARDS
    outcome, started = Outcome(), time.perf_counter()
    for first in range(shard * size, (shard + 1) * size, CHUNK):
        x = np.arange(first, first + CHUNK, dtype=np.uint64).astype(np.uint32).view(np.float32)
        outcome.merge(SUBJECTS[subject](x))
    record = Shard(subject, shard, digest, time.perf_counter() - started, outcome)
    path = _path(subject, shard, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(path)
    return record


def run(subject: str, results: Path = RESULTS) -> Iterator[Shard]:
    """All shards of a subject, in order."""
    digest = sources_digest(subject)
    for shard in range(SHARDS):
        yield run_shard(subject, shard, digest, results)


def _path(subject: str, shard: int, results: Path) -> Path:
    return results / subject.replace("/", "-") / f"{shard:02d}.json"
