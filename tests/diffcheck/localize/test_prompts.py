"""Logprobs of the prompts: a stale buffer is found although all else is equal, and what nobody returned is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from diffcheck.base.errors import ExitCode
from diffcheck.localize import localize
from diffcheck.localize.verdict import Verdict
from diffcheck.runs import RunSettings, run_localize
from tests.diffcheck.synthetic import flip, header, values, write

#: Logprobs of sample 0's two later prompt tokens; sample 1 has one prompt token.
PROMPTS = [[-0.5, -2.25], []]


def compared(folder: Path, right_prompts: list[list[float]] | None, change: object = None) -> Verdict:
    left, right = header(), header("megatron")
    changed = values()
    if change is not None:
        change(changed)  # type: ignore[operator]
    for head, prompts in ((left, PROMPTS), (right, right_prompts)):
        if prompts is not None:
            head.samples = [{**s, "prompt_logprobs": p} for s, p in zip(head.samples, prompts, strict=True)]
    return localize(write(folder / "left", values(), left), write(folder / "right", changed, right))


def test_a_stale_buffer_is_found_although_all_else_is_equal(tmp_path: Path) -> None:
    (tmp_path / "equal").mkdir()
    verdict = compared(tmp_path / "equal", PROMPTS)
    assert verdict.exit_code is ExitCode.EQUAL and verdict.prompt_logprobs is not None
    assert (verdict.prompt_logprobs.compared, verdict.prompt_logprobs.mismatch_count) == (2, 0)
    stale = [[-0.5, float(np.nextafter(np.float32(-2.25), np.float32(0)))], []]
    verdict = compared(tmp_path, stale)
    first = verdict.first_divergence
    assert verdict.exit_code is ExitCode.DIVERGED and first is not None
    assert (first.boundary, first.sample, first.position, first.differing) == ("prompt_logprobs", 0, 1, 1)
    assert (first.left, first.max_ulp) == (-2.25, 1) and "stale buffer" in verdict.summary


def test_an_operator_that_diverges_comes_first(tmp_path: Path) -> None:
    verdict = compared(tmp_path, [[-0.5, -9.0], []], flip("layers.0.mlp.act", 1))
    assert verdict.first_divergence is not None and verdict.first_divergence.boundary == "layers.0.mlp.act"
    assert verdict.prompt_logprobs is not None and verdict.prompt_logprobs.mismatch_count == 1


def test_a_side_that_returned_none_is_named(tmp_path: Path) -> None:
    verdict = compared(tmp_path, None)
    assert verdict.exit_code is ExitCode.EQUAL and verdict.prompt_logprobs is None
    assert verdict.prompts_not_compared == "the train side (megatron, decode) returned none"


def test_engines_that_score_whole_sequences_return_them() -> None:
    """transformers, live: every prompt token but the first, of samples of one to three prompt tokens and more."""
    settings = RunSettings(phase="prefill", level="digest")
    verdict, _ = run_localize(settings, "transformers", "transformers", lambda *_: None)
    assert verdict.prompt_logprobs is not None, verdict.prompts_not_compared
    # The built-in samples' prompts: 5, 17, 40, 9, 26 and 3 tokens.
    assert (verdict.prompt_logprobs.compared, verdict.prompt_logprobs.mismatch_count) == (94, 0)
