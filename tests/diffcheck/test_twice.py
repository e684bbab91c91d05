"""rlk-diff twice: an engine that repeats itself is said to, one that does not is caught."""

from __future__ import annotations

import json
from pathlib import Path

from diffcheck.base.errors import ExitCode
from diffcheck.trace.joined import JoinedTrace
from tests.diffcheck.in_process import refused, rlk
from tests.diffcheck.synthetic import pair

#: Changes the last layer's output in every run but the first: what a race or a stale buffer would do.
UNSTEADY = """
def unsteady(model):
    runs = 0

    def later(module, args, output):
        nonlocal runs
        runs += 1
        return output * (1 + 2**-6) if runs > FIRST else output

    model.model.norm.register_forward_hook(later)
"""


def test_an_engine_that_changes_from_run_to_run_is_caught(tmp_path: Path) -> None:
    samples, patch, out = tmp_path / "s.jsonl", tmp_path / "patch.py", tmp_path / "out.json"
    samples.write_text('{"prompt_token_ids": [3, 4, 5], "response_token_ids": [6, 7]}\n')
    patch.write_text(UNSTEADY.replace("FIRST", "1"))
    common = ("twice", "--engine", "transformers", "--phase", "prefill", "--samples", str(samples))
    done = rlk(*common, "--patch", f"{patch}:unsteady", "--condition", "again", "--json", str(out))
    assert done.code == ExitCode.DIVERGED, done.err
    assert "first differs at norm" in done.out
    assert json.loads(out.read_text())["runs"][0]["first_divergence"]["boundary"] == "norm"
    done = rlk(*common, "--neighbours", "2")
    assert done.code == ExitCode.EQUAL, done.out + done.err
    assert [line.split()[0] for line in done.out.splitlines()] == ["equal"] * 3
    assert "2 logprobs" in done.out


def test_bad_input_is_refused() -> None:
    refused(rlk("twice", "--engine", "nobody"), "--engine 'nobody'")
    refused(rlk("twice", "--condition", "sometimes"), "--condition 'sometimes'")


def test_some_samples_of_a_trace_read_as_a_trace_of_their_own(tmp_path: Path) -> None:
    left, _ = pair(tmp_path, lambda _: None, "sampled")
    part = JoinedTrace(left, [1])
    assert part.header.samples == [left.header.samples[1]] and len(part.header.object.token_ids) == 1
    for name in ("embed_tokens", "logprobs"):
        rows = 3 if name == "logprobs" else len(left.header.object.token_ids[1])
        assert part.entry(name).shape[0] == rows == part.digests(name).shape[0]
        assert (part.digests(name) == left.digests(name)[-rows:]).all()
    # Of the sampled rows (0, 2, 4, ...) of six, those of the second sample.
    stored = part.stored_rows("embed_tokens")
    assert stored is not None and list(stored) == [0, 2]
    row = part.row("embed_tokens", 0)
    assert row is not None and (row == left.row("embed_tokens", 4)).all()
