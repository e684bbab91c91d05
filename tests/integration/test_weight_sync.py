"""Weights into a live strict vLLM: what is rolled out has the bits of the weights that were sent, or nothing is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from diffcheck.base.models import resolve_model
from reference.contract.profiles import profile
from reference.models.qwen3 import forward
from tests.integration.strict_cases import PROFILE

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engines

ENVIRONMENT = {
    "RLK_PROFILE": PROFILE,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.weight_sync_run"],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {what: value for line in lines for what, value in line.items()}


def expected_logprobs(tokens: list[int], *, new: bool) -> list[float]:
    """The specification's, of the weights as they were sent."""
    from safetensors.torch import load_file

    from tests.integration.weight_sync_run import PROMPT

    folder, config = resolve_model("tiny-qwen3-tied")
    weights = load_file(folder / "model.safetensors")
    if new:
        generator = torch.Generator().manual_seed(1)
        weights = {
            n: (w.float() + 0.02 * torch.randn(w.shape, generator=generator)).bfloat16() for n, w in weights.items()
        }
    arrays = {name: weight.float().numpy() for name, weight in weights.items()}
    result = forward(arrays, config, [PROMPT + tokens], profile(PROFILE), prompt_lengths=[len(PROMPT)])
    return [float(x) for x in result.logprobs[0]]


@pytest.mark.parametrize("version", ["old", "new", "old again"])
def test_a_rollout_has_the_bits_of_the_weights_that_were_sent(version: str, told: dict[str, Any]) -> None:
    """Keys and values of the last weights lie in the prefix cache, and must not be found."""
    rollout = told[version]
    assert len(rollout["logprobs"]) == 8 and np.unique(rollout["logprobs"]).size > 1
    assert rollout["logprobs"] == expected_logprobs(rollout["tokens"], new=version == "new")


def test_the_update_changed_something(told: dict[str, Any]) -> None:
    assert told["old"]["logprobs"] != told["new"]["logprobs"] and told["old"] == told["old again"]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("never updated", "an update that did not finish, the rollout asks for version 0"),
        ("stale", "rank 0 holds weights of version 2, the rollout asks for version 3"),
        ("partial", "and 0 others are missing: send all of them"),
        ("changed behind its back", "WeightSyncError: 1 live weights are not those that were sent, model.layers.1.mlp"),
        ("torn", "WeightSyncError: 1 live weights are not those that were sent, model.layers.2.mlp.up_proj.weight"),
        ("after a torn update", "an update that did not finish"),
        ("in flight", "requests are in flight"),
    ],
)
def test_what_is_not_whole_is_refused_before_a_rollout(what: str, named: str, told: dict[str, Any]) -> None:
    assert named in told[what]


def test_aborting_a_request_changes_no_bit_of_another(told: dict[str, Any]) -> None:
    assert told["kept logprobs"] == expected_logprobs(told["kept"], new=False)


def test_rollout_and_training_agree_after_every_step_in_one_process(told: dict[str, Any]) -> None:
    """Real steps: the loss falls, the logprobs move, and the two engines stay equal in every bit."""
    steps = [told[f"trained {i}"] for i in range(3)]
    for step in steps:
        assert len(step["rollout"]) == 8 and step["rollout"] == step["train"]
    assert steps[0]["prompt"] < steps[1]["prompt"] < steps[2]["prompt"]
