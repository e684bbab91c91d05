"""The mismatch of a step under the names that users of other frameworks read, each by that framework's own formula.

The formulas differ: some are of probabilities, some clamp the ratio, some average by sample first. So each is computed
from the logprobs themselves, never from another summary. Everything is in float64 from the float32 logprobs; a
framework that computes in float32 may differ in the last digits. Where bits are equal, d is 0, for NaN too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from integration.grpo.buffer.records import Buffered, Logprobs
from integration.grpo.mismatch.metrics import Array, MetricsError, log_ratios, tokens_of, unequal_bits


@dataclass(frozen=True)
class Tokens:
    """Response tokens of one step, and what a formula needs of them."""

    #: Logprobs in nats, float32 [tokens]: of the rollout, and as the trainer recomputed them.
    rollout: Logprobs
    train: Logprobs
    #: Number of the sample of each token, int64 [tokens]; any numbers do.
    sample: npt.NDArray[np.int64]
    #: Logprobs in the forward pass of the update, float32 [tokens]; None where nobody kept them.
    update: Logprobs | None = None
    #: Bounds of the truncated importance weight, as slime and vime set them by default.
    tis_clip: tuple[float, float] = (0.0, 2.0)
    #: verl's rollout_is_threshold: weights are clamped to [1 / threshold, threshold].
    is_threshold: float = 2.0

    def __post_init__(self) -> None:
        sizes = {side.shape for side in (self.rollout, self.train, self.sample)}
        sizes |= set() if self.update is None else {self.update.shape}
        if len(sizes) != 1 or not self.rollout.size:
            raise MetricsError("no token to compare, or not the same tokens on each side", "pass one entry a token")

    @classmethod
    def of(cls, samples: Iterable[Buffered], update: Logprobs | None = None) -> Tokens:
        """All response tokens of scored samples, in order."""
        rollout, train, place, _ = tokens_of(list(samples))
        return cls(rollout, train, place, update)

    @property
    def log_ratio(self) -> Array:
        """log r = train - rollout, [tokens]."""
        return log_ratios(self.rollout, self.train)

    @property
    def ratio(self) -> Array:
        return np.exp(self.log_ratio)

    @property
    def distance(self) -> Array:
        """|d| = |rollout - train|, [tokens]."""
        return np.abs(self.log_ratio)

    @property
    def probability_distance(self) -> Array:
        """|exp(rollout) - exp(train)|, [tokens]."""
        left, right = (np.exp(side.astype(np.float64)) for side in (self.rollout, self.train))
        return np.where(unequal_bits(self.rollout, self.train), np.abs(left - right), 0.0)

    def mean_of_sample_means(self, values: Array) -> float:
        _, index = np.unique(self.sample, return_inverse=True)
        return float((np.bincount(index, values) / np.bincount(index)).mean())


@dataclass(frozen=True)
class MetricName:
    """One name of one framework."""

    framework: str
    name: str
    #: What it is, with d = rollout - train and r = exp(train - rollout) of each token.
    formula: str
    compute: Callable[[Tokens], float | None]


def _k1(t: Tokens) -> float:
    return float(-t.log_ratio.mean()) + 0.0


def _k3(t: Tokens) -> float:
    return float((np.expm1(t.log_ratio) - t.log_ratio).mean())


def _verl_ess(t: Tokens) -> float:
    weight = np.clip(t.ratio, 1.0 / t.is_threshold, t.is_threshold)
    return float(1.0 / np.square(weight / (weight.mean() + 1e-8)).mean())


def _std(t: Tokens) -> float | None:
    # One token has no spread of its own.
    return float(t.probability_distance.std(ddof=1)) if t.rollout.size > 1 else None


def _ppo_kl(t: Tokens) -> float | None:
    return None if t.update is None else t.mean_of_sample_means(-log_ratios(t.train, t.update)) + 0.0


def _tis_clipfrac(t: Tokens) -> float:
    return t.mean_of_sample_means((np.clip(t.ratio, *t.tis_clip) != t.ratio).astype(np.float64))


#: slime and vime share their names.
METRIC_NAMES = (
    MetricName(
        "slime",
        "train/train_rollout_logprob_abs_diff",
        "mean over samples of the mean of |d| over their tokens",
        lambda t: t.mean_of_sample_means(t.distance),
    ),
    MetricName(
        "slime",
        "train/ppo_kl",
        "mean over samples of the mean of train - update over their tokens; update: logprobs in the update's forward",
        _ppo_kl,
    ),
    MetricName(
        "slime",
        "train/tis_clipfrac",
        "mean over samples of the share of their tokens with r outside [tis_clip_low, tis_clip] = [0, 2]",
        _tis_clipfrac,
    ),
    MetricName(
        "verl",
        "training/rollout_probs_diff_max",
        "max |exp(rollout) - exp(train)|",
        lambda t: float(t.probability_distance.max()),
    ),
    MetricName(
        "verl",
        "training/rollout_probs_diff_mean",
        "mean |exp(rollout) - exp(train)|",
        lambda t: float(t.probability_distance.mean()),
    ),
    MetricName(
        "verl",
        "training/rollout_probs_diff_std",
        "standard deviation of |exp(rollout) - exp(train)|, with n - 1",
        _std,
    ),
    MetricName("verl", "rollout_corr/kl", "mean of d", _k1),
    MetricName("verl", "rollout_corr/k3_kl", "mean of r - 1 - log r", _k3),
    MetricName(
        "verl",
        "rollout_corr/rollout_is_eff_sample_size",
        "1 / mean((w / (mean(w) + 1e-8))^2), w = r clamped to [1/2, 2]",
        _verl_ess,
    ),
    MetricName(
        "nemo_rl", "train/token_mult_prob_error", "mean of exp(|d|)", lambda t: float(np.exp(t.distance).mean())
    ),
    MetricName("nemo_rl", "train/gen_kl_error", "mean of r - 1 - log r", _k3),
    MetricName("trl", "sampling/sampling_logp_difference/mean", "mean of |d|", lambda t: float(t.distance.mean())),
    MetricName("trl", "sampling/sampling_logp_difference/max", "max of |d|", lambda t: float(t.distance.max())),
    MetricName("prime_rl", "mismatch_kl/all/mean", "mean of r - 1 - log r", _k3),
)
FRAMEWORKS = tuple(dict.fromkeys(metric.framework for metric in METRIC_NAMES))


def named(tokens: Tokens) -> dict[str, dict[str, float]]:
    """Framework -> name -> value. A name whose inputs are not there is left out, never made up.

    Values may be infinite or NaN where logprobs are.
    """
    found: dict[str, dict[str, float]] = {framework: {} for framework in FRAMEWORKS}
    with np.errstate(over="ignore", invalid="ignore"):
        for metric in METRIC_NAMES:
            value = metric.compute(tokens)
            if value is not None:
                found[metric.framework][metric.name] = value
    return found


def flat(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """ "framework/name" -> value, for loggers that know one level of names."""
    return {f"{framework}/{name}": value for framework, names in values.items() for name, value in names.items()}
