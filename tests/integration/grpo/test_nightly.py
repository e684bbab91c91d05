"""The nightly's checks must be able to fail."""

from __future__ import annotations

from typing import Any

from integration.grpo.nightly import check_evidence, check_native, check_reward, check_strict

STEPS = 50


def steps(**changes: Any) -> list[dict[str, Any]]:
    rising = [0.25 + 0.6 * i / STEPS for i in range(STEPS)]
    plain = {"compared": 10, "mismatch_count": 0, "max_abs_diff": 0.0}
    return [{"step": i + 1, "reward_mean": rising[i], **plain, **changes} for i in range(STEPS)]


def test_strict() -> None:
    assert check_strict(steps(), STEPS)[1]
    assert not check_strict(steps()[:-1], STEPS)[1]
    for field, value in (("mismatch_count", 1), ("max_abs_diff", 1e-9), ("max_abs_diff", None), ("compared", 0)):
        spoilt = steps()
        spoilt[7][field] = value
        _, passed, found = check_strict(spoilt, STEPS)
        assert not passed and "[8]" in found


def test_native() -> None:
    assert check_native(steps(mismatch_count=3), STEPS)[1]
    spoilt = steps(mismatch_count=3)
    spoilt[20]["mismatch_count"] = 0
    assert not check_native(spoilt, STEPS)[1] and not check_native([], STEPS)[1]


def test_reward() -> None:
    assert check_reward(steps(), "strict")[1]
    assert not check_reward(steps(reward_mean=0.9), "strict")[1]
    assert not check_reward(steps()[::-1], "strict")[1]


def test_evidence() -> None:
    def evidence(verdict: str = "equal", observed: int = 63, fallbacks: int = 0) -> dict[str, Any]:
        probe = {"step": 1, "verdict": verdict, "coverage": {"observed": observed, "expected": 63}}
        return {"preflight": [probe], "fallbacks": fallbacks}

    assert check_evidence(evidence(), "strict")[1] and check_evidence(evidence("diverged", 62), "native")[1]
    assert not check_evidence(evidence("diverged"), "strict")[1]
    assert not check_evidence(evidence(observed=62), "strict")[1]
    assert not check_evidence(evidence(fallbacks=1), "strict")[1]
    assert not check_evidence({"preflight": [], "fallbacks": 0}, "strict")[1]
