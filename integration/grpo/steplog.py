"""steps.jsonl: one line a finished step, on disk before the run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.errors import InputError
from diffcheck.base.files import write_text
from integration.grpo.buffer.records import Buffered, samples_digest
from integration.grpo.mismatch.metrics import Mismatch


def step_record(
    step: int, version: int, found: Mismatch, samples: Sequence[Buffered], learned: dict[str, Any], digest: str
) -> dict[str, Any]:
    """The line of a step, without its timings.

    Args:
        version: of the weights that drew the samples and that scored them.
        samples: what the update consumed. learned: what the trainer said of it.
        digest: of the weights that it made.
    """
    rewards = np.array([sample.reward for sample in samples], np.float64)
    responses = sum(sample.response_token_ids.size for sample in samples if sample.response_token_ids is not None)
    return {
        "step": step,
        "weight_version": version,
        "train_version": version,
        **found.to_json(),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "kl_ref": learned["kl"],
        "loss": learned["loss"],
        "grad_norm": learned["grad_norm"],
        "clip_fraction": learned["clip_fraction"],
        "tokens": responses + sum(sample.prompt_token_ids.size for sample in samples),
        "response_tokens": responses,
        "samples_digest": samples_digest(samples),
        "weights_digest": digest,
    }


def append_step(path: Path, record: dict[str, Any]) -> None:
    """Add a line and wait until the disk has it.

    Raises:
        InputError: it cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "free some space, or make it writable; then resume") from None


def read_steps(path: Path) -> list[dict[str, Any]]:
    """All finished steps. A last line that a crash tore is none.

    Raises:
        InputError: the file cannot be read, or a line is not the step that follows.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}", "restore the file from a copy") from None
    steps = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            found = record["step"]
        except (ValueError, TypeError, KeyError):
            found = None
        if found != number:
            raise InputError(f"{path}:{number}: not the record of step {number}", "restore the file from a copy")
        steps.append(record)
    return steps


def keep_steps(path: Path, last: int) -> list[dict[str, Any]]:
    """Drop all lines after step ``last``.

    Returns:
        The steps that are left.

    Raises:
        InputError: as `read_steps`; or a step up to ``last`` is missing.
    """
    steps = read_steps(path)
    if len(steps) < last:
        raise InputError(
            f"{path}: ends at step {len(steps)}, the checkpoint is of step {last}", "restore it from a copy"
        )
    write_text(path, "".join(json.dumps(record) + "\n" for record in steps[:last]))
    return steps[:last]
