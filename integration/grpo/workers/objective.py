"""What GRPO maximises, as pure functions.

Advantages are those of Shao et al., DeepSeekMath (2024), eq. 3.2: rewards of a group, centred and scaled. The objective
is PPO's clipped one on every token, averaged over all response tokens of the batch, minus the KL to a frozen policy by
the estimator k3 = exp(ref - now) - 1 - (ref - now).

Options, with S sequences of |o_i| tokens in a batch: ratios clipped higher than lower, and the mean over all tokens,
are of Yu et al., DAPO (2025), eq. 8; the mean over sequences of their tokens' means is DeepSeekMath's eq. 3; advantages
that are not scaled, and sums over S * max_tokens whatever the lengths, are Dr. GRPO's (Liu et al. 2025, "Understanding
R1-Zero-Like Training", section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Tensor = Any
#: Keeps a group of almost equal rewards from being blown up.
_EPSILON = 1e-6


def advantages(
    rewards: Sequence[float], groups: Sequence[int], *, ddof: int = 0, scale: bool = True
) -> npt.NDArray[np.float32]:
    """(reward - mean) / (standard deviation + 1e-6) within each group, computed in float64.

    Args:
        rewards: one a sample. groups: each sample's group.
        ddof: the standard deviation divides by the group's size less this: 0 (of the group, NumPy's default) or 1 (of
            the population that it was drawn from, PyTorch's default, TRL and verl).
        scale: False leaves out the division (Dr. GRPO).

    Returns:
        float32 [samples]; exactly 0 for all of a group whose rewards are equal.
    """
    values, keys = np.asarray(rewards, np.float64), np.asarray(groups)
    result = np.zeros(values.shape, np.float64)
    for key in np.unique(keys):
        mine = keys == key
        group = values[mine]
        if (group == group[0]).all():  # their mean, rounded, may be another number
            continue
        centred = group - group.mean()
        result[mine] = centred / (group.std(ddof=ddof) + _EPSILON) if scale else centred
    return result.astype(np.float32)


def token_weights(lengths: Sequence[int], level: str, max_tokens: int) -> tuple[list[float], float]:
    """What each token of a sequence counts in the loss.

    Args:
        lengths: tokens of each sequence of the batch that are learned from.
        level: ``token`` (mean over all tokens), ``sequence`` (mean over sequences of the mean over their tokens) or
            ``constant`` (the sum over ``max_tokens`` for each sequence).

    Returns:
        A weight for the tokens of each sequence, and what the weighted sum is divided by.
    """
    if level == "sequence":
        return [1.0 / length if length else 0.0 for length in lengths], float(len(lengths))
    return [1.0] * len(lengths), float(sum(lengths) if level == "token" else len(lengths) * max_tokens)


class Objective(NamedTuple):
    """Sums over the tokens of one micro-batch: the loss, differentiable, and counts for the log."""

    loss: Tensor
    clipped: int
    kl: float


def objective(
    now: Tensor,
    old: Tensor,
    advantage: Tensor,
    *,
    weight: Tensor,
    count: float,
    clip: float,
    clip_high: float,
    reference: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Objective:
    """Loss of some tokens: their part of the batch's weighted sum over ``count``.

    Args:
        now, old: logprobs of the policy in training and of the one that drew the tokens: float32 [n], nats.
        advantage: float32 [n].
        weight: float32 [n]; with ``count``, as `token_weights` returns them.
        clip, clip_high: ratios are clipped to [1 - clip, 1 + clip_high].
        reference: logprobs of the frozen policy, if the KL is wanted.
    """
    import torch

    ratio = torch.exp(now - old)
    bounded = ratio.clamp(1.0 - clip, 1.0 + clip_high)
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    clipped = int((bounded * advantage < ratio * advantage).sum())
    loss, kl = -gain, 0.0
    if reference is not None:
        delta = reference - now
        k3 = torch.expm1(delta) - delta
        loss = loss + kl_coef * k3
        kl = float(k3.detach().double().sum())
    return Objective((loss * weight).sum() / count, clipped, kl)
