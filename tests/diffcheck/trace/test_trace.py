"""Traces on disk: atomic, verified, refused with file and field when damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diffcheck.base.errors import TraceError
from diffcheck.localize import localize
from diffcheck.trace.reader import Trace
from diffcheck.trace.schema import HEADER, SEAL, seal
from diffcheck.trace.writer import TraceWriter
from tests.diffcheck.synthetic import header, values, write


def edit(folder: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    path = folder / HEADER
    data = json.loads(path.read_text())
    change(data)
    data.pop(SEAL)
    path.write_text(seal(data))


def read_all(folder: Path) -> None:
    trace = Trace(folder)
    for name in trace.header.boundaries:
        trace.values(name)
        trace.digests(name)


@pytest.mark.parametrize("level", ["digest", "sampled", "full"])
def test_what_was_written_is_read(tmp_path: Path, level: str) -> None:
    patterns = values()
    trace = write(tmp_path / "t", patterns, header(level=level))
    for name, (bits, _) in patterns.items():
        if level == "full" or name == "logprobs":
            assert np.array_equal(trace.values(name), bits)
        elif level == "sampled":
            assert np.array_equal(trace.values(name), bits[::2])
        else:
            assert trace.values(name).size == 0
        assert trace.entry(name).shape == bits.shape


def test_levels_share_their_digests(tmp_path: Path) -> None:
    traces = [write(tmp_path / level, values(), header(level=level)) for level in ("digest", "sampled", "full")]
    hashes = [{n: e.sha256 for n, e in t.header.boundaries.items()} for t in traces]
    assert hashes[0] == hashes[1] == hashes[2]


def test_many_files_when_a_trace_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffcheck.trace.writer.FLUSH_BYTES", 300)
    trace = write(tmp_path / "t", values())
    assert len(trace.header.files) > 5
    assert localize(trace, write(tmp_path / "u", values())).verdict == "equal"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema=3), "schema 3"),
        (lambda d: d.pop("schema"), "'schema' is missing"),
        (lambda d: d.pop("phase"), "'phase' is missing"),
        (lambda d: d.update(colour=1), "'colour'"),
        (lambda d: d.update(level="half"), "'half'"),
        (lambda d: d["object"].pop("rope"), "'rope'"),
        (lambda d: d["boundaries"]["norm"].update(dtype="float8"), "norm"),
        (lambda d: d["boundaries"]["norm"].update(file="other"), "norm"),
        (lambda d: d["boundaries"]["norm"].pop("shape"), "shape"),
        (lambda d: d["boundaries"]["norm"].update(sha256="0" * 64), "norm"),
        (lambda d: d["boundaries"]["norm"].update(shape=[9, 8]), "norm"),
    ],
)
def test_a_wrong_header_is_refused_by_field(
    tmp_path: Path,
    change: Callable[[dict], object],  # type: ignore[type-arg]
    words: str,
) -> None:
    write(tmp_path / "t", values())
    edit(tmp_path / "t", change)
    with pytest.raises(TraceError, match=r"(?s)t/") as caught:
        read_all(tmp_path / "t")
    assert words in caught.value.cause and caught.value.remedy


def test_not_json_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", values())
    (tmp_path / "t" / HEADER).write_text("{")
    with pytest.raises(TraceError, match="not valid JSON"):
        Trace(tmp_path / "t")


def test_a_missing_or_foreign_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such trace folder"):
        Trace(tmp_path / "none")
    with pytest.raises(TraceError, match="not a trace folder"):
        Trace(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", values())
    (path,) = (tmp_path / "t").glob("*.safetensors")
    data = path.read_bytes()
    for size in (0, 4, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(TraceError, match="rank0-00000"):
            read_all(tmp_path / "t")
    path.unlink()
    with pytest.raises(TraceError, match="missing"):
        read_all(tmp_path / "t")


def test_every_flipped_bit_of_the_values_is_found(tmp_path: Path) -> None:
    """Whatever byte is damaged, reading the trace fails; no comparison is made from damaged bits."""
    write(tmp_path / "t", values())
    (path,) = (tmp_path / "t").glob("*.safetensors")
    good = path.read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(0)
    for at in rng.integers(start, len(good), 60):
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(TraceError):
            read_all(tmp_path / "t")


def test_an_abandoned_write_leaves_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", "full")
    writer.put("norm", *values()["norm"])
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_trace_is_replaced_only_on_request(tmp_path: Path) -> None:
    write(tmp_path / "t", values())
    with pytest.raises(TraceError, match="already exists"):
        TraceWriter(tmp_path / "t", "full")
    writer = TraceWriter(tmp_path / "t", "full", overwrite=True)
    assert Trace(tmp_path / "t").header.boundaries
    writer.put("norm", *values()["norm"])
    writer.finish(header())
    assert list(Trace(tmp_path / "t").header.boundaries) == ["norm"]


def test_a_folder_that_is_no_trace_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x")
    with pytest.raises(TraceError, match="already exists"):
        TraceWriter(tmp_path / "precious", "full", overwrite=True)
