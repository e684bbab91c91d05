"""Live strict engines for the tests, and what each of their traces must be: the specification's, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.models import resolve_model
from diffcheck.base.samples import Sample
from diffcheck.capture.adapter import open_adapter
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.session import EngineSession
from diffcheck.localize import localize
from diffcheck.localize.verdict import Verdict
from diffcheck.trace.reader import Trace

PROFILE = "strict-v1/fma32-seq"
#: Prompt and response lengths: none alike, more requests than a power of two, prompts of more than one block.
LENGTHS = ((5, 20), (17, 12), (40, 10), (9, 16), (26, 1), (3, 18), (66, 9), (33, 4))


def quiet(_what: str, _done: int, _total: int) -> None:
    return None


def batch(vocabulary: int = 509, seed: int = 11) -> tuple[Sample, ...]:
    """Random tokens; the last sample begins as the third does, so that a prefix cache has something to find."""
    rng = np.random.default_rng(seed)
    tokens = [tuple(int(t) for t in rng.integers(3, vocabulary, prompt + response)) for prompt, response in LENGTHS]
    samples = [Sample(ids[:prompt], ids[prompt:]) for ids, (prompt, _) in zip(tokens, LENGTHS, strict=True)]
    last = samples[-1]
    samples[-1] = Sample(samples[2].prompt_token_ids[: len(last.prompt_token_ids)], last.response_token_ids)
    return tuple(samples)


@dataclass
class Live:
    """One engine and the traces that were taken of it."""

    capture: Any
    folder: Path
    count: int = 0
    traces: dict[str, Trace] = field(default_factory=dict)

    def trace(self, **changes: Any) -> Trace:
        """A trace of `batch`; the same question is asked once."""
        key = repr(sorted(changes.items()))
        if key not in self.traces:
            self.count += 1
            out = self.folder / str(self.count)
            plan = CapturePlan(**{"samples": batch(), "out": out, "phase": "decode", **changes})
            self.capture(plan)
            self.traces[key] = Trace(out)
        return self.traces[key]


@contextmanager
def live(engine: str, folder: Path, model: str = "tiny-qwen3", **options: Any) -> Iterator[Live]:
    """A running engine under the strict profile; the reference runs in this process."""
    path, _ = resolve_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = EngineOptions(engine, path, profile=PROFILE, max_length=128, **options)
    if engine == "reference":
        adapter = open_adapter(chosen, quiet)
        yield Live(lambda plan: adapter.capture(plan, quiet), folder)
        return
    with EngineSession(chosen, quiet, folder / "log") as session:
        yield Live(session.capture, folder)


def same(left: Trace, right: Trace, *, unobserved: tuple[str, ...] = ()) -> Verdict:
    """Check that two traces agree in every bit, and that nothing but ``unobserved`` was left unseen."""
    verdict = localize(left, right)
    assert verdict.verdict == "equal", verdict.summary + str(verdict.not_comparable)
    assert verdict.coverage is not None and set(verdict.coverage.unobserved) == set(unobserved)
    assert verdict.logprobs is not None and verdict.logprobs.mismatch_count == 0 and verdict.logprobs.max_abs_diff == 0
    assert verdict.logprobs.compared == sum(len(s["response_token_ids"]) for s in left.header.samples)
    return verdict
