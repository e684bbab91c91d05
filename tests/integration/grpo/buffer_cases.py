"""Runs of a data buffer without engines: what the tests of the buffer, the metrics and the report are fed with."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from integration.grpo.buffer import Buffer
from integration.grpo.buffer.records import Buffered, Generated, Logprobs, Scored

PROMPTS, GROUP, SEED = ([5, 6, 7], [8, 9]), 3, 4


def response(sample: Buffered) -> tuple[list[int], Logprobs]:
    """Tokens and logprobs that only the sample's seed decides."""
    rng = np.random.default_rng(sample.seed)
    tokens = rng.integers(3, 509, int(rng.integers(1, 9))).tolist()
    return tokens, -rng.exponential(size=len(tokens)).astype(np.float32)


def generated(sample: Buffered, version: int) -> Generated:
    tokens, logprobs = response(sample)
    return Generated(sample.id, tokens, logprobs, "length", version)


def scored(sample: Buffered, drift: float = 0.0) -> Scored:
    assert sample.rollout_logprobs is not None
    return Scored(sample.id, (sample.rollout_logprobs + np.float32(drift)).astype(np.float32), 0.5)


def new(path: Path) -> Buffer:
    buffer = Buffer.open(path)
    buffer.add_weights(0, 0, "w0")
    return buffer


def plan(buffer: Buffer, step: int, version: int | None = None) -> list[Buffered]:
    version = step - 1 if version is None else version
    return buffer.plan(step, PROMPTS, GROUP, rollout_version=version, seed=SEED)


def roll_out(buffer: Buffer, step: int, version: int | None = None) -> None:
    version = step - 1 if version is None else version
    buffer.generated([generated(sample, version) for sample in plan(buffer, step, version)])


def learn(buffer: Buffer, step: int, drift: float = 0.0) -> list[Buffered]:
    """From rolled out to synced."""
    buffer.rewarded({sample.id: float(sample.group_index) for sample in buffer.samples(step)})
    buffer.scored([scored(sample, drift) for sample in buffer.samples(step)], step - 1)
    used = buffer.consume(step)
    buffer.synced(step, step, f"w{step}")
    return used


def run(buffer: Buffer, first: int, last: int, drift: float = 0.0) -> None:
    for step in range(first, last + 1):
        roll_out(buffer, step)
        learn(buffer, step, drift)
