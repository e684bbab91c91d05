"""Real vLLM and Megatron-core in bfloat16 against the reference under their profiles: every boundary, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.models import resolve_model
from diffcheck.base.samples import Sample
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.session import EngineSession
from tests.diffcheck.in_process import rlk
from tests.reference.native.processor import modelled_processor

pytestmark = [
    pytest.mark.engines,
    modelled_processor,
]


FOLDER, _ = resolve_model("tiny-qwen3")


@pytest.fixture(scope="module")
def vllm() -> Iterator[EngineSession]:
    """One engine for both phases."""
    with EngineSession(EngineOptions("vllm", FOLDER), lambda *_: None) as session:
        yield session


def samples() -> tuple[Sample, ...]:
    draw, drawn = random.Random(1), []
    for length, prompt in ((20, 8), (45, 20), (33, 5)):
        ids = tuple(draw.randrange(400) for _ in range(length))
        drawn.append(Sample(ids[:prompt], ids[prompt:]))
    return tuple(drawn)


def compare(engine: EngineSession, profile: str, phase: str, folder: Path) -> dict[str, Any]:
    """The verdict of a real engine against the reference under ``profile``, on the built-in tiny model."""
    recorded, verdict = folder / "samples.jsonl", folder / "verdict.json"
    recorded.write_text("".join(json.dumps(s.to_json()) + "\n" for s in samples()))
    engine.capture(CapturePlan(samples=samples(), out=folder / "engine", phase=phase))
    ours = ("--engine", "reference", "--profile", profile, "--out", str(folder / "ours"))
    done = rlk("capture", *ours, "--phase", phase, "--samples", str(recorded))
    assert done.code == 0, done.err
    done = rlk("compare", str(folder / "ours"), str(folder / "engine"), "--json", str(verdict))
    assert done.code in (0, 1), done.err
    result: dict[str, Any] = json.loads(verdict.read_text())
    return result


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_vllm(phase: str, vllm: EngineSession, tmp_path: Path) -> None:
    verdict = compare(vllm, "vllm-0.32-cpu", phase, tmp_path)
    assert verdict["verdict"] == "equal"
    assert verdict["logprobs"]["compared"] == 65 and verdict["logprobs"]["mismatch_count"] == 0
    assert verdict["coverage"]["observed"] >= 62


def test_megatron(tmp_path: Path) -> None:
    """All but the last step, whose exponential and logarithm are MKL's."""
    with EngineSession(EngineOptions("megatron", FOLDER), lambda *_: None) as megatron:
        verdict = compare(megatron, "megatron-0.16-local", "prefill", tmp_path)
    differing = [b for b in verdict["boundaries"] if b["status"] not in ("equal", "unobserved")]
    assert [b["name"] for b in differing] in ([], ["logprobs"])
    assert sum(b["status"] == "equal" for b in verdict["boundaries"]) >= 61
    assert verdict["logprobs"]["max_abs_diff"] < 2e-6
