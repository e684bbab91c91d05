"""Preflight: both live engines, on a probe batch, compared boundary by boundary before they are trusted with a step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcheck.base.errors import ExitCode, RlkError
from diffcheck.base.files import write_text
from diffcheck.base.samples import Sample
from diffcheck.capture.adapter import CaptureResult
from diffcheck.capture.plan import CapturePlan
from diffcheck.localize import localize
from diffcheck.trace.reader import Trace
from integration.grpo.config import GrpoConfig
from integration.grpo.workers.actors import Actor

#: Prompts of the probe batch.
PROMPTS = 4


class DivergedError(RlkError):
    """Two strict engines disagree: the run stops, and what it wrote stays."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause, remedy, ExitCode.DIVERGED)


@dataclass(frozen=True)
class Preflight:
    """One comparison of the live engines."""

    #: Step whose rollouts these weights make.
    step: int
    version: int
    verdict: str
    summary: str
    #: Boundaries observed on both sides, and all of them.
    observed: int
    expected: int
    #: Where they first diverge.
    boundary: str | None
    compared: int

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "version": self.version,
            "verdict": self.verdict,
            "coverage": {"observed": self.observed, "expected": self.expected},
            "first_divergence": self.boundary,
            "logprobs_compared": self.compared,
            "summary": self.summary,
        }


def run_preflight(
    rollout: Actor,
    trainer: Actor,
    config: GrpoConfig,
    prompts: Sequence[tuple[int, ...]],
    *,
    step: int,
    version: int,
    folder: Path,
) -> Preflight:
    """Draw responses to ``prompts`` in the rollout engine, score them in the trainer, and localize.

    The verdict goes to ``folder``, and the traces too where the engines diverge.

    Raises:
        RlkError: an engine could not be captured.
    """
    name = folder / f"step-{step:06d}"
    traces = {side: name / side for side in ("rollout", "train")}
    shutil.rmtree(name, ignore_errors=True)
    plan = CapturePlan(
        samples=tuple(Sample(prompt) for prompt in prompts),
        out=traces["rollout"],
        generate=config.max_tokens,
        seed=config.seed + step,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        weight_version=version,
    )
    drawn = CaptureResult.from_json(rollout.call("capture", plan=plan.to_json()))
    scored = {**plan.to_json(), "samples": [s.to_json() for s in drawn.samples], "out": str(traces["train"])}
    trainer.call("capture", plan=scored, version=version)
    verdict = localize(Trace(traces["rollout"]), Trace(traces["train"]))
    write_text(folder / f"step-{step:06d}.json", json.dumps(verdict.to_json(), indent=1))
    if verdict.verdict != "diverged":
        shutil.rmtree(name)
    coverage, first, logprobs = verdict.coverage, verdict.first_divergence, verdict.logprobs
    return Preflight(
        step,
        version,
        verdict.verdict,
        verdict.summary,
        coverage.observed if coverage else 0,
        coverage.expected if coverage else 0,
        first.boundary if first else None,
        logprobs.compared if logprobs else 0,
    )


def require_equal(found: Preflight) -> None:
    """Raises:
    DivergedError: the engines of a strict run are not equal at every boundary that was seen, or nothing was seen.
    """
    if found.verdict == "diverged":
        raise DivergedError(
            f"preflight before step {found.step}: {found.summary}",
            "the traces are in the folder preflight: rlk-diff compare, then rlk-diff infer",
        )
    if found.verdict != "equal":
        raise DivergedError(f"preflight before step {found.step}: {found.verdict}: {found.summary}", "see preflight")
