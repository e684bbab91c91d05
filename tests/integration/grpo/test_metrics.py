"""Mismatch metrics against numbers worked out by hand, and what is not a number."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.grpo.mismatch.metrics import MetricsError, Mismatch, mismatch, mismatch_of
from tests.integration.grpo import buffer_cases as cases

NAN, INF = float("nan"), float("inf")


def of(rollout: list[float], train: list[float]) -> Mismatch:
    names, positions = [f"s{i}" for i in range(len(rollout))], list(range(10, 10 + len(rollout)))
    return mismatch(np.array(rollout, np.float32), np.array(train, np.float32), names, positions)


def test_every_field_by_hand() -> None:
    found = of([-1.0, -2.0, -3.0, -0.5], [-1.0, -2.5, -2.0, -0.5])
    # log r = 0, -0.5, 1, 0
    r = [1.0, math.exp(-0.5), math.e, 1.0]
    assert (found.compared, found.mismatch_count) == (4, 2)
    assert (found.max_abs_diff, found.max_abs_sample, found.max_abs_position) == (1.0, "s2", 12)
    assert found.mean_abs_diff == 0.375 and found.k1 == -0.125
    assert found.k3 == pytest.approx(((r[1] - 1 + 0.5) + (r[2] - 1 - 1)) / 4, rel=1e-14)
    assert found.ess == pytest.approx(sum(r) ** 2 / (4 * sum(x * x for x in r)), rel=1e-14)
    assert (found.ratio_min, found.ratio_max) == (pytest.approx(r[1]), pytest.approx(r[2]))
    assert found.ratio_mean == pytest.approx(sum(r) / 4, rel=1e-14)
    assert list(found.to_json()) == [
        *("compared", "mismatch_count", "max_abs_diff", "max_abs_sample", "max_abs_position", "mean_abs_diff"),
        *("k1", "k3", "ess", "ratio_min", "ratio_mean", "ratio_max"),
    ]


def test_equal_bits_are_exactly_zero() -> None:
    found = of([-1.25, -1e-7, -40.0], [-1.25, -1e-7, -40.0]).to_json()
    assert [*found.values()] == [3, 0, 0.0, None, None, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert "-0.0" not in json.dumps(found)


def test_one_bit_and_a_zeros_sign_are_mismatches() -> None:
    next_to = float(np.nextafter(np.float32(-1.0), np.float32(0.0)))
    found = of([-2.0, -1.0], [-2.0, next_to])
    assert (found.mismatch_count, found.max_abs_diff, found.max_abs_position) == (1, 2.0**-24, 11)
    signs = of([-0.0, -1.0], [0.0, -1.0])
    assert (signs.mismatch_count, signs.max_abs_diff, signs.max_abs_sample) == (1, 0.0, "s0")


@pytest.mark.parametrize(
    ("rollout", "train", "count", "at"),
    [
        ([-1.0, NAN, -2.0], [-1.0, NAN, -2.0], 0, None),
        ([-1.0, -1.0, -2.0], [-3.0, NAN, -2.0], 2, "s1"),
        ([NAN, -1.0, -2.0], [-1.0, -1.0, -2.0], 1, "s0"),
        ([-INF, -1.0, -2.0], [-INF, -1.0, -2.0], 0, None),
        ([-INF, -1.0, -2.0], [-4.0, -1.0, -2.0], 1, "s0"),
        ([-1.0, -4.0, -2.0], [-1.0, -INF, -2.0], 1, "s1"),
    ],
)
def test_what_is_not_finite_is_null_with_a_note_and_valid_json(
    rollout: list[float], train: list[float], count: int, at: str | None
) -> None:
    found = of(rollout, train)
    assert (found.compared, found.mismatch_count, found.max_abs_sample) == (3, count, at)
    told = found.to_json()
    again = json.loads(json.dumps(told, allow_nan=False))
    assert "not finite" in again["note"]
    if count:
        assert not math.isfinite(found.max_abs_diff)
        assert again["max_abs_diff"] is None and f"max_abs_diff is {found.max_abs_diff}" in again["note"]
    else:
        assert again["max_abs_diff"] == 0.0 and again["ess"] == 1.0


def test_nan_is_one_class_whatever_its_payload() -> None:
    left = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    right = np.array([0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert mismatch(left, right, ["a", "b"], [0, 1]).mismatch_count == 0


def test_a_ratio_that_overflows_is_said_so() -> None:
    told = of([-2000.0, -1.0], [-1.0, -1.0]).to_json()
    assert told["max_abs_diff"] == 1999.0 and told["ratio_max"] is None and "ratio_max is inf" in told["note"]
    json.dumps(told, allow_nan=False)


def test_nothing_compared_is_an_error() -> None:
    with pytest.raises(MetricsError, match="no token to compare"):
        of([], [])
    with pytest.raises(MetricsError, match="no token to compare"):
        mismatch_of([], 0)
    one = np.zeros(1, np.float32)
    with pytest.raises(MetricsError, match=r"\(2,\) train logprobs, 1 ids"):
        mismatch(one, np.zeros(2, np.float32), ["a"], [0])
    with pytest.raises(MetricsError, match="float64"):
        mismatch(one, one.astype(np.float64), ["a"], [0])  # type: ignore[arg-type]


def test_samples_are_compared_within_one_weight_version(tmp_path: Path) -> None:
    with cases.new(tmp_path / "samples.sqlite") as buffer:
        cases.run(buffer, 1, 1)
        cases.roll_out(buffer, 2)
        used = buffer.samples(1)
        nudged = list(used)
        sample = used[4]
        assert sample.train_logprobs is not None
        changed = sample.train_logprobs.copy()
        changed[-1] -= 1
        nudged[4] = replace(sample, train_logprobs=changed)
        tokens = sum(len(cases.response(sample)[0]) for sample in used)
        same = mismatch_of(used, 0)
        assert (same.compared, same.mismatch_count) == (tokens, 0)
        found = mismatch_of(nudged, 0)
        assert (found.mismatch_count, found.max_abs_sample) == (1, sample.id)
        assert found.max_abs_position == sample.prompt_token_ids.size + changed.size - 2
        with pytest.raises(MetricsError, match="rolled out by weight version 0, recomputed by 1"):
            mismatch_of(used, 1)
        with pytest.raises(MetricsError, match="s000002-p00-g0 is generated"):
            mismatch_of(buffer.samples(2), 1)


finite = st.floats(-30, 0, width=32)


@given(pairs=st.lists(st.tuples(finite, finite), min_size=1, max_size=40))
def test_bounds_hold_for_any_logprobs(pairs: list[tuple[float, float]]) -> None:
    rollout, train = zip(*pairs, strict=True)
    found = of(list(rollout), list(train))
    assert found.mismatch_count == sum(
        np.float32(a).tobytes() != np.float32(b).tobytes() for a, b in zip(rollout, train, strict=True)
    )
    assert 0 < found.ess <= 1 + 1e-12 and found.k3 >= -1e-12
    assert found.ratio_min <= found.ratio_mean * (1 + 1e-12) and found.ratio_mean <= found.ratio_max * (1 + 1e-12)
    assert found.max_abs_diff >= found.mean_abs_diff * (1 - 1e-12) and abs(found.k1) <= found.mean_abs_diff + 1e-12
    assert all(math.isfinite(value) for value in asdict(found).values() if isinstance(value, float))
