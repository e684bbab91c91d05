"""One engine, run again: as it was, under load, with other sequences in its batches. An engine whose bits depend on
any of these explains nothing about another.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diffcheck.base.boundaries import graph
from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.progress import Progress
from diffcheck.base.samples import Sample
from diffcheck.capture.matching import check_matches
from diffcheck.capture.overrides import apply_overrides
from diffcheck.capture.plan import CapturePlan
from diffcheck.capture.session import EngineSession
from diffcheck.localize import localize
from diffcheck.localize.verdict import Verdict
from diffcheck.runs import LoadedModel, RunSettings, capture_plan, choose_samples, engine_options
from diffcheck.trace.joined import JoinedTrace
from diffcheck.trace.reader import Trace
from diffcheck.twice.load import busy

#: What another run of the same engine may be made under.
CONDITIONS = ("again", "load", "beside")
_WORDS = {"again": "run again", "load": "under load", "beside": "beside other sequences"}


@dataclass(frozen=True)
class Repeat:
    """One further run, compared with the first."""

    condition: str
    #: What was done, in words.
    what: str
    verdict: Verdict

    @property
    def exit_code(self) -> ExitCode:
        """Two runs that drew other tokens have diverged: it was one engine, asked the same twice."""
        if self.verdict.verdict == "not_comparable":
            return ExitCode.DIVERGED
        return self.verdict.exit_code

    @property
    def found(self) -> str:
        """What the comparison found, in one line."""
        v = self.verdict
        observed = f"{v.coverage.observed} of {v.coverage.expected} boundaries observed"
        if v.not_comparable:
            return f"differs in {v.not_comparable[0].field}: {v.not_comparable[0].left}, {v.not_comparable[0].right}"
        if (at := v.first_divergence) is not None:
            return f"first differs at {at.boundary} (sample {at.sample}, position {at.position}); {observed}"
        if v.verdict == "equal":
            compared = v.logprobs.compared if v.logprobs else 0
            return f"equal in bits; {compared:,} logprobs, {observed}"
        return v.summary

    def to_json(self) -> dict[str, Any]:
        v = self.verdict
        return {
            "condition": self.condition,
            "what": self.what,
            "verdict": "diverged" if self.exit_code is ExitCode.DIVERGED else v.verdict,
            "found": self.found,
            "first_divergence": asdict(v.first_divergence) if v.first_divergence else None,
            "logprobs": asdict(v.logprobs) if v.logprobs else None,
        }


def run_twice(
    settings: RunSettings,
    engine: str,
    conditions: Sequence[str],
    progress: Progress,
    *,
    neighbours: int = 4,
    told: Callable[[Repeat], None] = lambda _: None,
) -> list[Repeat]:
    """Run ``engine`` once, then once a condition, and compare each with the first run.

    Args:
        conditions: of `CONDITIONS`. "again" repeats the very request, draws included; the others score the tokens of
            the first run.
        neighbours: sequences put beside, before and after the samples.
        told: is given each result as soon as it is there.

    Raises:
        RlkError: anything a user can mend.
    """
    model = LoadedModel.load(settings.model, lambda text: progress(text, 0, 0))
    samples = choose_samples(settings, model, engine)
    others = _others(samples, neighbours, settings, model) if "beside" in conditions else []
    results = []
    with tempfile.TemporaryDirectory(prefix="rlk-twice-") as scratch:
        folder = Path(scratch)
        options, plan = apply_overrides(
            settings.overrides,
            engine_options(settings, model, engine, [*samples, *others]),
            capture_plan(settings, samples, folder / "first"),
        )
        check_matches(plan, graph(model.config, options.tensor_parallel))
        with EngineSession(options, progress) as session:
            first = session.capture(plan)
            for condition in conditions:
                trace, what = _run(session, plan, first.samples, condition, others)
                results.append(Repeat(condition, what, localize(Trace(first.trace), trace, progress)))
                told(results[-1])
                shutil.rmtree(trace.folder)
    return results


def _run(
    session: EngineSession, plan: CapturePlan, finished: Sequence[Sample], condition: str, others: Sequence[Sample]
) -> tuple[Trace, str]:
    """The trace of one further run, and what was done."""
    again = replace(plan, out=plan.out.with_name(condition))
    what = _WORDS[condition]
    if condition == "again":
        return Trace(session.capture(again).trace), what
    again = replace(again, samples=tuple(replace(s, rollout_logprobs=None, prompt_logprobs=None) for s in finished))
    if condition == "load":
        with busy(session.options.device) as processes:
            return Trace(session.capture(again).trace), f"{what}: {processes} processes multiply matrices"
    # Before and after, so that the samples' rows lie elsewhere too.
    half = len(others) // 2
    around = (*others[:half], *again.samples, *others[half:])
    trace = Trace(session.capture(replace(again, samples=around)).trace)
    return JoinedTrace(trace, range(half, half + len(finished))), f"{what}: {len(others)} of them"


def _others(samples: Sequence[Sample], count: int, settings: RunSettings, model: LoadedModel) -> list[Sample]:
    """Sequences that are none of ``samples``, of their lengths and a few tokens more or less."""
    if count < 1:
        raise InputError("--neighbours 0 puts nothing beside", "give at least 1, or leave the condition out")
    made = []
    vocabulary, longest = model.config.vocab_size, model.config.max_position_embeddings
    for i in range(count):
        like = samples[i % len(samples)]
        response = like.response_token_ids or tuple(range(3, 3 + settings.generate))
        length = max(1, min(len(like.prompt_token_ids) + i - count // 2, longest - len(response) - 1))
        tokens = like.prompt_token_ids * (length // len(like.prompt_token_ids) + 1)
        prompt = tuple((t + 17 * (i + 1)) % vocabulary for t in tokens[:length])
        made.append(Sample(prompt, tuple((t + 29) % vocabulary for t in response), temperature=like.temperature))
    return made
