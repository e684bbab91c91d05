"""What GRPO maximises, as pure functions.

Advantages are those of Shao et al., DeepSeekMath (2024), eq. 3.2: rewards of a group, centred and scaled. The objective
is PPO's clipped one on every token, averaged over all response tokens of the batch, minus the KL to a frozen policy by
the estimator k3 = exp(ref - now) - 1 - (ref - now).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Tensor = Any
#: Keeps a group of almost equal rewards from being blown up.
_EPSILON = 1e-6


def advantages(rewards: Sequence[float], groups: Sequence[int]) -> npt.NDArray[np.float32]:
    """(reward - mean) / (standard deviation + 1e-6) within each group, computed in float64.

    Args:
        rewards: one a sample. groups: each sample's group.

    Returns:
        float32 [samples]; 0 for all of a group whose rewards are equal.
    """
    values, keys = np.asarray(rewards, np.float64), np.asarray(groups)
    result = np.zeros(values.shape, np.float64)
    for key in np.unique(keys):
        mine = keys == key
        centred = values[mine] - values[mine].mean()
        result[mine] = centred / (centred.std() + _EPSILON)
    return result.astype(np.float32)


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
    tokens: int,
    clip: float,
    reference: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Objective:
    """Loss of some tokens: their part of the mean over all ``tokens`` of the batch.

    Args:
        now, old: logprobs of the policy in training and of the one that drew the tokens: float32 [n], nats.
        advantage: float32 [n].
        reference: logprobs of the frozen policy, if the KL is wanted.
    """
    import torch

    ratio = torch.exp(now - old)
    bounded = ratio.clamp(1.0 - clip, 1.0 + clip)
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    clipped = int((bounded * advantage < ratio * advantage).sum())
    loss, kl = -gain, 0.0
    if reference is not None:
        delta = reference - now
        k3 = torch.expm1(delta) - delta
        loss = loss + kl_coef * k3
        kl = float(k3.detach().double().sum())
    return Objective(loss.sum() / tokens, clipped, kl)
