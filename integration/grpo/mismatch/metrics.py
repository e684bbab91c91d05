"""What the rollout's and the trainer's logprobs of the same tokens disagree on: pure functions of float32 arrays.

With d = rollout - train (float32 values, difference in float64) and r = exp(train - rollout), all over tokens:
mismatch_count counts different bit patterns, NaN as one class; k1 = mean(-log r) and k3 = mean(r - 1 - log r) estimate
KL(rollout || train) (Schulman, "Approximating KL divergence"); ess = (sum r)^2 / (n sum r^2) is the effective sample
size of the importance weights as a share of n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcheck.base.bits import canonical
from diffcheck.base.errors import RlkError
from diffcheck.base.statistics import LogprobStats
from integration.grpo.buffer.records import Buffered, Logprobs

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class MetricsError(RlkError):
    """Two sets of logprobs cannot be compared: a verdict on them would mean nothing."""


@dataclass(frozen=True)
class Mismatch:
    """Fields of steps.jsonl, in their order. Differences in nats; a value may be infinite or NaN, see `to_json`."""

    compared: int
    mismatch_count: int
    max_abs_diff: float
    #: Id of the first sample with max_abs_diff, and the position there whose logits predict the token, as in localize;
    #: of bits that differ in a zero's sign only, the first. None where no bit differs.
    max_abs_sample: str | None
    max_abs_position: int | None
    mean_abs_diff: float
    k1: float
    k3: float
    ess: float
    ratio_min: float
    ratio_mean: float
    ratio_max: float
    #: Tokens that are infinite or NaN: in the rollout, in the trainer, and in both with equal bits.
    not_finite: tuple[int, int, int] = (0, 0, 0)

    def to_json(self) -> dict[str, Any]:
        """The fields for steps.jsonl; JSON has no infinities and no NaN: they become null, and ``note`` says why."""
        fields = asdict(self)
        del fields["not_finite"]
        lost = [name for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)]
        notes = [f"{name} is {fields[name]}" for name in lost]
        if any(self.not_finite):
            rollout, train, both = self.not_finite
            notes.append(f"not finite: {rollout} rollout logprobs, {train} train logprobs, {both} of them equal")
        note = {"note": "; ".join(notes)} if notes else {}
        return {**fields, **dict.fromkeys(lost), **note}


def mismatch(
    rollout: Logprobs,
    train: Logprobs,
    ids: Sequence[str] | npt.NDArray[np.str_],
    positions: Sequence[int] | Indices,
) -> Mismatch:
    """Compare logprobs of the same tokens.

    Args:
        rollout, train: float32 [tokens], in nats.
        ids: sample of each token. positions: position in it.

    Raises:
        MetricsError: there is no token, or the arrays are not float32 of one length.
    """
    if not (rollout.dtype == train.dtype == np.float32):
        raise MetricsError(f"logprobs are {rollout.dtype} and {train.dtype}", "compare the float32 values")
    if rollout.ndim != 1 or not rollout.shape == train.shape == (len(ids),) == (len(positions),):
        raise MetricsError(
            f"{rollout.shape} rollout and {train.shape} train logprobs, {len(ids)} ids, {len(positions)} positions",
            "compare logprobs of the same tokens, one each",
        )
    if not rollout.size:
        raise MetricsError("no token to compare", "a step without tokens has no mismatch count, not one of zero")
    unequal = unequal_bits(rollout, train)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        log_ratio = log_ratios(rollout, train)
        stats = LogprobStats.of(np.zeros_like(log_ratio), log_ratio, int(np.count_nonzero(unequal)))
        ratio = np.exp(log_ratio)
        ess = ratio.sum() ** 2 / (ratio.size * np.square(ratio).sum())
    # argmax stops at the first NaN, which is what a NaN on one side gives.
    at = int(np.where(unequal, np.abs(log_ratio), -1.0).argmax()) if stats.mismatch_count else None
    bad_rollout, bad_train = ~np.isfinite(rollout), ~np.isfinite(train)
    return Mismatch(
        compared=stats.compared,
        mismatch_count=stats.mismatch_count,
        max_abs_diff=stats.max_abs_diff,
        max_abs_sample=None if at is None else str(ids[at]),
        max_abs_position=None if at is None else int(positions[at]),
        mean_abs_diff=stats.mean_abs_diff,
        # Never -0.
        k1=stats.k1 + 0.0,
        k3=stats.k3 + 0.0,
        ess=float(ess),
        ratio_min=float(ratio.min()),
        ratio_mean=float(ratio.mean()),
        ratio_max=float(ratio.max()),
        not_finite=(int(bad_rollout.sum()), int(bad_train.sum()), int((bad_rollout & bad_train & ~unequal).sum())),
    )


def mismatch_of(samples: Iterable[Buffered], train_version: int) -> Mismatch:
    """Compare all response tokens of scored ``samples``.

    Raises:
        MetricsError: a sample has no logprobs of one side, or other weights made it than ``train_version``: their
            difference would be the update's, not the engines'.
    """
    chosen = list(samples)
    for sample in chosen:
        if sample.weight_version != train_version:
            raise MetricsError(
                f"sample {sample.id} was rolled out by weight version {sample.weight_version}, "
                f"recomputed by {train_version}",
                "recompute with the weights that rolled out",
            )
        if sample.rollout_logprobs is None or sample.train_logprobs is None:
            raise MetricsError(f"sample {sample.id} is {sample.state}: it lacks logprobs of one side", "score it first")
    rollout, train, place, position = tokens_of(chosen)
    return mismatch(rollout, train, np.array([sample.id for sample in chosen] or [""])[place], position)


def tokens_of(samples: Sequence[Buffered]) -> tuple[Logprobs, Logprobs, Indices, Indices]:
    """Rollout and train logprobs of all response tokens of scored samples, in order, with each token's place in
    ``samples`` and its position in the sample; a sample that lacks one side is left out.
    """
    rollout, train = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    place, position = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for number, sample in enumerate(samples):
        if sample.rollout_logprobs is not None and sample.train_logprobs is not None:
            rollout.append(sample.rollout_logprobs)
            train.append(sample.train_logprobs)
            size = sample.rollout_logprobs.size
            place.append(np.full(size, number))
            position.append(sample.prompt_token_ids.size - 1 + np.arange(size))
    return np.concatenate(rollout), np.concatenate(train), np.concatenate(place), np.concatenate(position)


def unequal_bits(rollout: Logprobs, train: Logprobs) -> npt.NDArray[np.bool_]:
    """Which tokens' float32 bit patterns differ; every NaN is the same."""
    left, right = (canonical(np.ascontiguousarray(side).view(np.uint32), "float32") for side in (rollout, train))
    return np.asarray(left != right, dtype=np.bool_)


def log_ratios(rollout: Logprobs, train: Logprobs) -> Array:
    """train - rollout in float64; 0 where the bits are equal, infinities and NaN included."""
    with np.errstate(invalid="ignore"):
        difference = train.astype(np.float64) - rollout.astype(np.float64)
    return np.where(unequal_bits(rollout, train), difference, 0.0)
