"""The same samples in another order compare as the same; one that differs is named, and one that is missing too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diffcheck.base.errors import ExitCode, TraceError
from diffcheck.base.record import KvMapping
from diffcheck.base.samples import Sample
from diffcheck.localize import localize
from diffcheck.trace.joined import join, partners
from diffcheck.trace.reader import Trace
from tests.diffcheck.synthetic import GRAPH, ROWS, Values, flip, header, values, write

#: Rows of each boundary with the two samples swapped.
SWAPPED = {name: np.concatenate([np.flatnonzero(rows.sample == i) for i in (1, 0)]) for name, rows in ROWS.items()}


def swapped(folder: Path, patterns: Values, level: str = "full") -> Trace:
    head = header("megatron", level)
    record = head.object
    for name in ("token_ids", "target_ids", "positions", "active"):
        setattr(record, name, getattr(record, name)[::-1])
    record.kv = KvMapping("paged", 16, record.kv.slots[::-1])
    head.samples = head.samples[::-1]
    rows = {node.name: SWAPPED[node.rows] for node in GRAPH}
    return write(folder, {n: (bits[rows[n]], dtype) for n, (bits, dtype) in patterns.items()}, head)


@pytest.mark.parametrize("level", ["full", "sampled", "digest"])
def test_another_order_compares_as_the_same(tmp_path: Path, level: str) -> None:
    left = write(tmp_path / "left", values(), header(level=level))
    verdict = localize(left, swapped(tmp_path / "right", values(), level))
    assert verdict.exit_code is ExitCode.EQUAL, verdict.summary
    assert any("another order" in note for note in verdict.notes)
    changed = values()
    flip("layers.1.mlp.act", 5, 2)(changed)
    verdict = localize(left, swapped(tmp_path / "changed", changed, level))
    first = verdict.first_divergence
    # Row 5 of the left order: sample 0 has 4 rows, so it is position 1 of sample 1.
    assert first is not None and (first.boundary, first.sample, first.position) == ("layers.1.mlp.act", 1, 1)


def test_values_and_rows_are_read_in_the_joined_order(tmp_path: Path) -> None:
    left = write(tmp_path / "left", values())
    joined = join(left, swapped(tmp_path / "right", values()))
    for name in ("norm", "logprobs", "layers.0.self_attn.k_cache"):
        np.testing.assert_array_equal(joined.values(name), left.values(name))
        np.testing.assert_array_equal(joined.row(name, 3), left.row(name, 3))
    assert join(left, left) is left


def test_a_damaged_row_is_still_found(tmp_path: Path) -> None:
    left = write(tmp_path / "left", values())
    right = swapped(tmp_path / "right", values())
    (path,) = right.folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(TraceError):
        localize(left, Trace(right.folder))


def test_samples_are_told_apart_by_id_then_tokens_then_prompt() -> None:
    a, b, c = Sample((1, 2), (3,)), Sample((1, 2), (4,)), Sample((9,), (9,))
    assert partners([a, b, c], [c, b, a]) == [2, 1, 0]
    named = [replace(a, id="x"), replace(a, id="y")]
    assert partners(named, named[::-1]) == [1, 0]
    # Equal samples keep their order; a changed response stays with its prompt; what is left over with its place.
    assert partners([a, a, c], [c, a, a]) == [1, 2, 0]
    assert partners([a, c], [c, replace(a, response_token_ids=(7,))]) == [1, 0]
    assert partners([a, b], [b]) == [None, 0]


def test_a_sample_without_partner_is_named(tmp_path: Path) -> None:
    left = write(tmp_path / "left", values())
    head = header("megatron")
    head.samples = head.samples[1:]
    for name in ("token_ids", "target_ids", "positions", "active"):
        setattr(head.object, name, getattr(head.object, name)[1:])
    kept = {node.name: ROWS[node.rows].sample > 0 for node in GRAPH}
    right = write(tmp_path / "right", {n: (bits[kept[n]], dtype) for n, (bits, dtype) in values().items()}, head)
    (mismatch,) = localize(left, right).not_comparable
    assert mismatch.field == "samples" and "sample 0 (tokens 3, 4, 5, 6, 7, ...) is only here" in mismatch.left
