"""The objective against its formula in float64, written down a second time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from integration.grpo.workers.objective import advantages, objective

torch = pytest.importorskip("torch")


def test_advantages_are_of_the_group() -> None:
    found = advantages([1.0, 3.0, 5.0, 5.0, 0.0, 10.0], [0, 0, 1, 1, 2, 2])
    assert found.dtype == np.float32
    assert found[2] == found[3] == 0, "equal rewards teach nothing"
    assert found[0] == -found[1] and found[4] == -found[5]
    assert found[1] == np.float32(1 / (1 + 1e-6)) and found[5] == np.float32(5 / (5 + 1e-6))


def test_advantages_do_not_depend_on_other_groups() -> None:
    rewards = [0.1, 0.7, 0.4, 0.9]
    alone = advantages(rewards, [0] * 4)
    mixed = advantages([rewards[0], 5.0, rewards[1], 7.0, rewards[2], rewards[3]], [1, 0, 1, 0, 1, 1])
    assert np.array_equal(alone, mixed[[0, 2, 4, 5]])


def expected(now: list[float], old: list[float], gain: list[float], ref: list[float], clip: float, kl: float) -> float:
    total = 0.0
    for n, o, a, r in zip(now, old, gain, ref, strict=True):
        ratio = math.exp(n - o)
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        total -= min(ratio * a, bounded * a) - kl * (math.exp(r - n) - 1 - (r - n))
    return total


def test_loss_and_gradient_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    now, old, ref = (rng.normal(-3, 0.4, 64).astype(np.float32) for _ in range(3))
    gain = rng.normal(0, 1, 64).astype(np.float32)
    tensor = torch.tensor(now, requires_grad=True)
    found = objective(
        tensor, torch.tensor(old), torch.tensor(gain), tokens=100, clip=0.2, reference=torch.tensor(ref), kl_coef=0.3
    )
    lists = [x.astype(np.float64).tolist() for x in (now, old, gain, ref)]
    assert float(found.loss.detach()) == pytest.approx(expected(*lists, 0.2, 0.3) / 100, rel=1e-5)
    found.loss.backward()
    for i in (0, 17, 63):
        ends = []
        for step in (-1e-6, 1e-6):
            moved = [list(x) for x in lists]
            moved[0][i] += step
            ends.append(expected(*moved, 0.2, 0.3) / 100)
        assert float(tensor.grad[i]) == pytest.approx((ends[1] - ends[0]) / 2e-6, rel=1e-3, abs=1e-7)
    ratio = np.exp(now.astype(np.float64) - old)
    clipped = ((ratio > 1.2) & (gain > 0)) | ((ratio < 0.8) & (gain < 0))
    assert found.clipped == int(clipped.sum()) > 0
    assert np.all(tensor.grad.numpy()[clipped] != 0), "the KL pulls where the clip does not"


def test_a_clipped_token_has_no_gradient_of_its_own() -> None:
    now = torch.tensor([0.0, -1.0], requires_grad=True)
    found = objective(now, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0]), tokens=2, clip=0.2)
    found.loss.backward()
    assert found.clipped == 1 and now.grad.tolist() == [0.0, -0.5]


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped() -> None:
    now = torch.tensor([-2.0, -3.0], requires_grad=True)
    found = objective(now, now.detach(), torch.tensor([1.0, -1.0]), tokens=2, clip=0.2)
    assert found.clipped == 0 and float(found.loss.detach()) == 0 and found.kl == 0
