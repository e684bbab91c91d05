"""The objective against its formula in float64, written down a second time."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest

from integration.grpo.workers.objective import advantages, objective, token_weights

torch = pytest.importorskip("torch")
#: Two tokens, the mean over them.
PLAIN: dict[str, Any] = {"weight": torch.ones(2), "count": 2, "clip": 0.2, "clip_high": 0.2}


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


def test_equal_rewards_are_exactly_zero() -> None:
    """Their rounded mean is another number in a third of all groups, and the quotient of two roundings is anything."""
    rng = np.random.default_rng(0)
    for size in range(2, 33):
        for value in (*rng.normal(0, 1, 60), *rng.uniform(0, 1, 60), 1e9 + 0.3, -1e300, 5e-324, 0.1):
            for options in ({}, {"ddof": 1}, {"scale": False}):
                assert not advantages([float(value)] * size, [3] * size, **options).any()  # type: ignore[arg-type]
    almost = [0.3, 0.3, 0.3, float(np.nextafter(0.3, 1))]
    assert advantages(almost, [0] * 4, scale=False).any(), "rewards one bit apart are not equal"


REWARDS = [[1.0, 0.0, 0.25, 0.5], [3.0, -1.0, 2.5, 2.5]]


@pytest.mark.parametrize("ddof", [0, 1])
def test_advantages_are_deepseekmath_eq_3_2(ddof: int) -> None:
    """(r - mean(r)) / std(r): NumPy's deviation for ddof 0, Python's and PyTorch's sample deviation for 1."""
    found = advantages([r for row in REWARDS for r in row], [0] * 4 + [1] * 4, ddof=ddof)
    deviation = statistics.stdev if ddof else statistics.pstdev
    formula = [(r - statistics.fmean(row)) / (deviation(row) + 1e-6) for row in REWARDS for r in row]
    assert np.array_equal(found, np.array(formula, np.float32))


def test_advantages_of_dr_grpo_are_only_centred() -> None:
    found = advantages([r for row in REWARDS for r in row], [0] * 4 + [1] * 4, scale=False)
    assert found.tolist() == [r - statistics.fmean(row) for row in REWARDS for r in row]


#: Ratios and advantages of three responses of 1, 4 and 2 tokens, max_tokens 8.
RATIOS = [[1.27], [0.7, 1.0, 1.5, 1.1], [0.9, 1.25]]
GAINS, LONGEST = [1.5, -0.5, 2.0], 8


def published(level: str, low: float, high: float) -> float:
    """The formulas as their papers print them, of one group; to be maximised."""
    terms = [
        [min(r * a, min(max(r, 1 - low), 1 + high) * a) for r in row] for row, a in zip(RATIOS, GAINS, strict=True)
    ]
    group = len(terms)
    match level:
        case "sequence":  # DeepSeekMath eq. 3: 1/G sum_i 1/|o_i| sum_t
            return sum(sum(row) / len(row) for row in terms) / group
        case "token":  # DAPO eq. 8: 1 / sum_i |o_i| sum_i sum_t
            return sum(map(sum, terms)) / sum(map(len, terms))
        case _:  # Dr. GRPO: 1/G sum_i sum_t, over a constant in place of |o_i|
            return sum(map(sum, terms)) / group / LONGEST


@pytest.mark.parametrize("level", ["sequence", "token", "constant"])
@pytest.mark.parametrize("high", [0.2, 0.28])
def test_every_normalisation_and_the_higher_clip_are_the_published_formula(level: str, high: float) -> None:
    lengths = [len(row) for row in RATIOS]
    weights, count = token_weights(lengths, level, LONGEST)
    now = torch.tensor([math.log(r) for row in RATIOS for r in row], requires_grad=True)
    each = torch.tensor([[a, w] for a, w, n in zip(GAINS, weights, lengths, strict=True) for _ in range(n)])
    found = objective(now, torch.zeros(7), each[:, 0], weight=each[:, 1], count=count, clip=0.2, clip_high=high)
    assert float(found.loss.detach()) == pytest.approx(-published(level, 0.2, high), rel=1e-6)
    found.loss.backward()
    # 1.27 and 1.25 lie above 1.2 and below 1.28: with the higher clip they still teach.
    assert [bool(now.grad[i]) for i in (0, 6)] == [high == 0.28] * 2 and found.clipped == (1 if high == 0.28 else 3)
    scale = {"sequence": 3 * 2, "token": 7, "constant": 3 * 8}[level]
    assert float(now.grad[5]) == pytest.approx(-0.9 * 2.0 / scale, rel=1e-6)


def test_parts_of_a_batch_add_up_to_its_loss() -> None:
    weights, count = token_weights([1, 4, 2], "sequence", LONGEST)
    parts = []
    for row, a, w in zip(RATIOS, GAINS, weights, strict=True):
        n = torch.ones(len(row))
        now = torch.tensor([math.log(r) for r in row])
        parts.append(float(objective(now, 0 * n, a * n, weight=w * n, count=count, clip=0.2, clip_high=0.2).loss))
    assert sum(parts) == pytest.approx(-published("sequence", 0.2, 0.2), rel=1e-6)


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
        tensor,
        torch.tensor(old),
        torch.tensor(gain),
        weight=torch.ones(64),
        count=100,
        clip=0.2,
        clip_high=0.2,
        reference=torch.tensor(ref),
        kl_coef=0.3,
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
    found = objective(now, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0]), **PLAIN)
    found.loss.backward()
    assert found.clipped == 1 and now.grad.tolist() == [0.0, -0.5]


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped() -> None:
    now = torch.tensor([-2.0, -3.0], requires_grad=True)
    found = objective(now, now.detach(), torch.tensor([1.0, -1.0]), **PLAIN)
    assert found.clipped == 0 and float(found.loss.detach()) == 0 and found.kl == 0
