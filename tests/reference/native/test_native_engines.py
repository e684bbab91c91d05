"""Real vLLM and Megatron-core in bfloat16 against the reference under their profiles: every boundary, bit for bit."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.reference.native.processor import modelled_processor

pytestmark = [
    pytest.mark.engines,
    modelled_processor,
]


def rlk_diff(*arguments: str) -> int:
    """Exit code of one command."""
    command = [sys.executable, "-m", "diffcheck.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode


def compare(engine: str, profile: str, phase: str, folder: Path) -> dict[str, Any]:
    """The verdict of a real engine against the reference under ``profile``, on the built-in tiny model."""
    draw, samples, verdict = random.Random(1), folder / "samples.jsonl", folder / "verdict.json"
    lines = []
    for length, prompt in ((20, 8), (45, 20), (33, 5)):
        ids = [draw.randrange(400) for _ in range(length)]
        lines.append(json.dumps({"prompt_token_ids": ids[:prompt], "response_token_ids": ids[prompt:]}))
    samples.write_text("\n".join(lines) + "\n")
    common = ("--phase", phase, "--samples", str(samples))
    assert rlk_diff("capture", "--engine", engine, "--out", str(folder / "engine"), *common) == 0
    ours = ("--engine", "reference", "--profile", profile, "--out", str(folder / "ours"))
    assert rlk_diff("capture", *ours, *common) == 0
    rlk_diff("compare", str(folder / "ours"), str(folder / "engine"), "--json", str(verdict))
    result: dict[str, Any] = json.loads(verdict.read_text())
    return result


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_vllm(phase: str, tmp_path: Path) -> None:
    verdict = compare("vllm", "vllm-0.32-cpu", phase, tmp_path)
    assert verdict["verdict"] == "equal"
    assert verdict["logprobs"]["compared"] == 65 and verdict["logprobs"]["mismatch_count"] == 0
    assert verdict["coverage"]["observed"] >= 62


def test_megatron(tmp_path: Path) -> None:
    """All but the last step, whose exponential and logarithm are MKL's."""
    verdict = compare("megatron", "megatron-0.16-local", "prefill", tmp_path)
    differing = [b for b in verdict["boundaries"] if b["status"] not in ("equal", "unobserved")]
    assert [b["name"] for b in differing] in ([], ["logprobs"])
    assert sum(b["status"] == "equal" for b in verdict["boundaries"]) >= 61
    assert verdict["logprobs"]["max_abs_diff"] < 2e-6
