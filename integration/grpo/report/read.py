"""Reads the folder of a run. What is damaged, foreign or contradicts itself is refused by file, line and field."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from diffcheck.base.errors import ExitCode, RlkError
from integration.grpo.buffer import Buffer
from integration.grpo.buffer.records import Buffered, samples_digest
from integration.grpo.mismatch.metric_names import Tokens, named
from integration.grpo.mismatch.metrics import mismatch_of

STEPS, EVIDENCE, SAMPLES, CONFIG = "steps.jsonl", "evidence.json", "samples.sqlite", "config.json"
PHASES = ("rollout", "reward", "recompute", "update", "sync", "preflight", "checkpoint", "total")

#: Fields of a step, and what they are: a count, a text, a number, or one of the last two where it may be null.
FIELDS = {
    **dict.fromkeys(("step", "weight_version", "train_version", "compared", "mismatch_count"), "count"),
    "max_abs_diff": "number or null",
    "max_abs_sample": "text or null",
    "max_abs_position": "count or null",
    **dict.fromkeys(("mean_abs_diff", "k1", "k3", "ess", "ratio_min", "ratio_mean", "ratio_max"), "number or null"),
    **dict.fromkeys(("reward_mean", "reward_std"), "number"),
    "kl_ref": "number or null",
    **dict.fromkeys(("loss", "grad_norm", "clip_fraction"), "number"),
    **dict.fromkeys(("tokens", "response_tokens"), "count"),
    **dict.fromkeys(("samples_digest", "weights_digest"), "text"),
}
_EVIDENCE = {
    "schema": int,
    "versions": dict,
    "mode": str,
    "rollout": dict,
    "train": dict,
    "preflight": list,
    "fallbacks": int,
}


class RunError(RlkError):
    """The folder is no run, or its files are damaged or contradict each other."""

    def __init__(self, cause: str, remedy: str = "restore the file, or run --resume to write it again") -> None:
        super().__init__(cause, remedy)


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it; every step was checked against the samples it was computed from."""

    folder: Path
    steps: list[dict[str, Any]]
    evidence: dict[str, Any]
    #: What the run was asked for; empty where the folder does not say.
    config: dict[str, Any]
    #: State -> number of samples, of all steps that are finished.
    samples: Counter[str]
    #: Framework -> name -> value over the tokens of all finished steps.
    names: dict[str, dict[str, float]]
    #: SHA-256 over the prompts of each step: what two arms must share.
    prompts: list[str]

    @property
    def mode(self) -> str:
        return str(self.evidence["mode"])

    @cached_property
    def compared(self) -> int:
        return sum(step["compared"] for step in self.steps)

    @cached_property
    def mismatches(self) -> int:
        return sum(step["mismatch_count"] for step in self.steps)

    @property
    def worst(self) -> dict[str, Any]:
        """The step with the largest difference; one that is not finite is larger than all."""
        return max(self.steps, key=lambda step: math.inf if step["max_abs_diff"] is None else step["max_abs_diff"])

    @property
    def mean_abs_diff(self) -> float | None:
        """Over all tokens."""
        total = 0.0
        for step in self.steps:
            if step["mean_abs_diff"] is None:
                return None
            total += step["mean_abs_diff"] * step["compared"]
        return total / self.compared

    @property
    def fallbacks(self) -> int:
        return int(self.evidence["fallbacks"])

    @property
    def exit_code(self) -> ExitCode:
        """A native run has nothing to keep; a strict one must be equal, without fallbacks."""
        if self.mode == "strict" and (self.mismatches or self.fallbacks):
            return ExitCode.DIVERGED
        return ExitCode.EQUAL


def read_run(folder: Path) -> Run:
    """Read and check a run.

    Raises:
        RunError: a file is missing, damaged or contradicts another.
        DataBufferError: samples.sqlite is unusable.
    """
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder", "name the output folder of a run")
    steps = _read_steps(folder / STEPS)
    evidence = _read_object(folder / EVIDENCE)
    _check_evidence(folder / EVIDENCE, evidence)
    config = _read_object(folder / CONFIG) if (folder / CONFIG).exists() else {}
    counts: Counter[str] = Counter()
    prompts, used = [], list[Buffered]()
    with Buffer.open(folder / SAMPLES, read_only=True) as buffer:
        buffer.check()
        for step in steps:
            samples = buffer.samples(step["step"])
            counts.update(sample.state for sample in samples)
            consumed = [sample for sample in samples if sample.state == "consumed"]
            _check_step(folder, step, consumed)
            prompts.append("".join(f"{s.id}{s.prompt_token_ids.tolist()}" for s in samples))
            used += consumed
    return Run(folder, steps, evidence, config, counts, named(Tokens.of(used)), prompts)


def _read_steps(path: Path) -> list[dict[str, Any]]:
    steps = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            step = json.loads(line)
        except ValueError as error:
            raise RunError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(step, dict):
            raise RunError(f"{where}: not a JSON object")
        for name, kind in FIELDS.items():
            _check_field(where, step, name, kind)
        if not isinstance(step.get("seconds"), dict):
            raise RunError(f"{where}: field seconds is not an object")
        for phase in PHASES:
            _check_field(f"{where}, seconds", step["seconds"], phase, "number")
        if step["step"] != number:
            raise RunError(f"{where}: field step is {step['step']}, expected {number}")
        if not step["compared"] > 0 or step["mismatch_count"] > step["compared"]:
            raise RunError(f"{where}: field mismatch_count is {step['mismatch_count']} of {step['compared']} compared")
        steps.append(step)
    if not steps:
        raise RunError(f"{path}: holds no finished step", "let the run finish a step")
    return steps


def _check_field(where: str, values: dict[str, Any], name: str, kind: str) -> None:
    if name not in values:
        raise RunError(f"{where}: field {name} is missing")
    value = values[name]
    if value is None and kind.endswith("or null"):
        return
    if kind.startswith("count"):
        good = type(value) is int and value >= 0
    elif kind.startswith("text"):
        good = isinstance(value, str)
    else:
        good = type(value) in (int, float) and math.isfinite(value)
    if not good:
        raise RunError(f"{where}: field {name} is {value!r}, expected a {kind}")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise RunError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path}: not a JSON object")
    return found


def _check_evidence(path: Path, evidence: dict[str, Any]) -> None:
    if evidence.get("schema") != 1:
        raise RunError(f"{path}: field schema is not 1", "use the release of rlk that wrote it")
    for name, kind in _EVIDENCE.items():
        if type(evidence.get(name)) is not kind:
            raise RunError(f"{path}: field {name} is not a {kind.__name__}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise RunError(f"{path}: {reason}", "name the output folder of a run, with all its files") from None


def _check_step(folder: Path, step: dict[str, Any], samples: list[Buffered]) -> None:
    """Hold what a step says to the samples that it was computed from, where that is exact on any machine."""
    where = f"{folder / STEPS}, line {step['step']}"
    found = samples_digest(samples)
    if found != step["samples_digest"]:
        raise RunError(f"{where}: field samples_digest is not that of {SAMPLES}: one of them is of another run")
    again = mismatch_of(samples, step["train_version"]).to_json()
    for name in ("compared", "mismatch_count", "max_abs_diff", "max_abs_sample", "max_abs_position"):
        if again[name] != step[name]:
            raise RunError(f"{where}: field {name} is {step[name]}, its samples give {again[name]}")
