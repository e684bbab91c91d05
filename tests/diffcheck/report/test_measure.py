"""What reports draw, against counting element by element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diffcheck.base.bits import to_float32, ulp_distance
from diffcheck.localize import localize
from diffcheck.localize.compare import histogram
from diffcheck.report.measure import measure
from tests.diffcheck.synthetic import Values, flip, pair, values, write

#: bfloat16: 0, smallest subnormals, 1 and its neighbours, -1, infinity, two NaN.
PATTERNS = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x3F80, 0x3F81, 0xBF80, 0x7F80, 0x7FC0, 0xFFC1], np.uint16)


def steps(a: int, b: int) -> int:
    """Representable values from one pattern to the other, by counting: -1 for a NaN against a number."""

    def place(u: int) -> int:
        return -(u & 0x7FFF) if u & 0x8000 else u

    nan = [(u & 0x7FFF) > 0x7F80 for u in (a, b)]
    return 0 if all(nan) else -1 if any(nan) else abs(place(a) - place(b))


def test_ulp_distance_counts_steps() -> None:
    a, b = (grid.reshape(1, -1) for grid in np.meshgrid(PATTERNS, PATTERNS))
    expected = [steps(int(x), int(y)) for x, y in zip(a[0], b[0], strict=True)]
    assert ulp_distance(a, "bfloat16", b, "bfloat16")[0].tolist() == expected


def test_unequal_dtypes_are_measured_in_float32() -> None:
    one = np.array([[0x3F80]], np.uint16)
    next_up = np.array([[0x3F800001]], np.uint32)
    assert ulp_distance(one, "bfloat16", next_up, "float32").tolist() == [[1]]


@pytest.mark.parametrize("level", ["full", "sampled"])
def test_a_histogram_counts_every_stored_element(tmp_path: Path, level: str) -> None:
    name = "layers.1.mlp.act"

    def change(patterns: Values) -> None:
        bits, _ = patterns[name]
        bits[0, 0] ^= 1
        bits[2, 1] += 5
        bits[4, 2] = 0x7FC0
        bits[4, 3] += 300

    left, right = pair(tmp_path, change, level)
    found = histogram(name, left, right)
    assert found is not None
    x, y = left.values(name), right.values(name)
    expected = [steps(int(a), int(b)) for a, b in zip(x.reshape(-1), y.reshape(-1), strict=True)]
    assert found.nan == expected.count(-1) == 1
    counts = [sum(1 for s in expected if s >= 0 and s.bit_length() == k) for k in range(found.counts.size)]
    assert found.counts.tolist() == counts and found.counts.sum() + found.nan == x.size
    assert found.used.size == max(expected).bit_length() + 1


def test_digests_have_no_histogram_and_unknown_distances(tmp_path: Path) -> None:
    left, right = pair(tmp_path, flip("layers.1.mlp_residual", 2), "digest")
    measured = measure(localize(left, right), left, right)
    assert histogram("layers.1.mlp_residual", left, right) is None
    assert not measured.histograms
    (layer,) = (rows for rows in measured.layers if rows.label == "1")
    assert np.isnan(layer.distance[2]) and np.delete(layer.distance, 2).tolist() == [0.0] * (layer.distance.size - 1)


def test_distances_of_layers_are_zero_only_where_all_bits_agree(tmp_path: Path) -> None:
    name = "layers.0.mlp_residual"

    def change(patterns: Values) -> None:
        patterns[name][0][1, 0] ^= 1
        patterns["norm"][0][3, :] = 0

    left, right = pair(tmp_path, change)
    verdict = localize(left, right)
    found = {rows.label: rows.distance for rows in measure(verdict, left, right).layers}
    assert list(found) == ["embed", "0", "1", "norm"]
    u, v = (to_float32(t.values(name), "bfloat16").astype(np.float64)[1] for t in (left, right))
    assert found["0"][1] == pytest.approx(np.linalg.norm(u - v) / np.linalg.norm(u), rel=1e-12)
    assert np.flatnonzero(found["0"]).tolist() == [1] and found["norm"][3] == 1.0 and not found["1"].any()


def test_the_sign_of_a_zero_is_a_difference(tmp_path: Path) -> None:
    sides = []
    for name, pattern in (("left", 0x0000), ("right", 0x8000)):
        patterns = values()
        patterns["norm"][0][0, 0] = pattern
        sides.append(write(tmp_path / name, patterns))
    distance = measure(localize(*sides), *sides).layers[-1].distance
    assert np.flatnonzero(distance).tolist() == [0]


def test_tokens_are_the_logprobs_of_the_traces(tmp_path: Path) -> None:
    left, right = pair(tmp_path, flip("logprobs", 2, bit=20))
    verdict = localize(left, right)
    tokens = measure(verdict, left, right).tokens
    assert tokens is not None and verdict.logprobs is not None
    assert np.flatnonzero(tokens.difference).tolist() == [2]
    assert tokens.difference.max() == verdict.logprobs.max_abs_diff
