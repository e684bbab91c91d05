"""Other frameworks' names, against numbers worked out by hand with each one's formula."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from integration.grpo.buffer.records import Logprobs
from integration.grpo.mismatch.metric_names import METRIC_NAMES, Tokens, flat, named
from integration.grpo.mismatch.metrics import MetricsError, mismatch_of
from tests.integration.grpo import buffer_cases as cases

#: log r = 0, -0.5, 1, 0: two samples of three tokens and of one.
ROLLOUT, TRAIN, SAMPLE = [-1.0, -2.0, -3.0, -0.5], [-1.0, -2.5, -2.0, -0.5], [7, 7, 7, 9]


def array(values: list[float]) -> Logprobs:
    return np.array(values, np.float32)


def tokens(update: list[float] | None = None) -> Tokens:
    return Tokens(array(ROLLOUT), array(TRAIN), np.array(SAMPLE, np.int64), None if update is None else array(update))


E = math.exp
R = [1.0, E(-0.5), E(1.0), 1.0]
P = [0.0, E(-2.0) - E(-2.5), E(-2.0) - E(-3.0), 0.0]
#: Clamped to [1/2, 2]: only the third leaves.
W = [1.0, E(-0.5), 2.0, 1.0]
MEAN_P, MEAN_W = sum(P) / 4, sum(W) / 4
K3 = ((R[1] - 1 + 0.5) + (R[2] - 1 - 1)) / 4
EXPECTED = {
    "slime/train/train_rollout_logprob_abs_diff": ((0 + 0.5 + 1) / 3 + 0) / 2,
    "slime/train/ppo_kl": ((-0.25 + 0 + 0) / 3 + 0.5) / 2,
    "slime/train/tis_clipfrac": (1 / 3 + 0) / 2,
    "verl/training/rollout_probs_diff_max": P[2],
    "verl/training/rollout_probs_diff_mean": MEAN_P,
    "verl/training/rollout_probs_diff_std": math.sqrt(sum((p - MEAN_P) ** 2 for p in P) / 3),
    "verl/rollout_corr/kl": (0 + 0.5 - 1 + 0) / 4,
    "verl/rollout_corr/k3_kl": K3,
    "verl/rollout_corr/rollout_is_eff_sample_size": 1 / (sum((w / (MEAN_W + 1e-8)) ** 2 for w in W) / 4),
    "nemo_rl/train/token_mult_prob_error": (1 + E(0.5) + E(1) + 1) / 4,
    "nemo_rl/train/gen_kl_error": K3,
    "trl/sampling/sampling_logp_difference/mean": 0.375,
    "trl/sampling/sampling_logp_difference/max": 1.0,
    "prime_rl/mismatch_kl/all/mean": K3,
}


def test_every_name_has_its_hand_computed_value() -> None:
    found = flat(named(tokens(update=[-0.75, -2.5, -2.0, -1.0])))
    assert set(found) == set(EXPECTED) == {f"{m.framework}/{m.name}" for m in METRIC_NAMES}
    for name, value in EXPECTED.items():
        assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-15), name


def test_a_name_without_its_input_is_left_out() -> None:
    found = flat(named(tokens()))
    assert set(EXPECTED) - set(found) == {"slime/train/ppo_kl"}
    one = Tokens(array([-1.0]), array([-1.5]), np.zeros(1, np.int64))
    assert "verl/training/rollout_probs_diff_std" not in flat(named(one))


def test_equal_bits_are_zero_under_every_name(tmp_path: Path) -> None:
    with cases.new(tmp_path / "samples.sqlite") as buffer:
        cases.run(buffer, 1, 1)
        used = buffer.samples(1)
    of = Tokens.of(used)
    assert len(set(of.sample.tolist())) == 6 and of.rollout.size == mismatch_of(used, 0).compared
    for name, value in flat(named(of)).items():
        if name.endswith("eff_sample_size"):
            assert value == pytest.approx(1.0, abs=3e-8)
        else:
            assert value == (1.0 if name.endswith("token_mult_prob_error") else 0.0), name


def test_nan_on_one_side_is_seen_and_on_both_is_equal() -> None:
    nan = float("nan")
    both = Tokens(array([nan, -1.0]), array([nan, -1.0]), np.zeros(2, np.int64))
    assert named(both)["trl"]["sampling/sampling_logp_difference/max"] == 0.0
    left = Tokens(array([nan, -1.0]), array([-1.0, -1.0]), np.zeros(2, np.int64))
    assert math.isnan(named(left)["trl"]["sampling/sampling_logp_difference/max"])


def test_no_tokens_are_an_error() -> None:
    with pytest.raises(MetricsError):
        Tokens(array([]), array([]), np.zeros(0, np.int64))
    with pytest.raises(MetricsError):
        Tokens(array([-1.0]), array([-1.0]), np.zeros(2, np.int64))
