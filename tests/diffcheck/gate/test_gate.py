"""rlk-diff gate: every rule opens and shuts, JUnit XML says the same, bad input leaves nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from diffcheck.base.errors import ExitCode
from diffcheck.gate import Rules, Subject, exit_code, judge, junit
from tests.diffcheck.in_process import refused, rlk
from tests.diffcheck.synthetic import flip, pair

SUBJECT = Subject(
    "run",
    "diverged",
    "they differ",
    compared=100,
    mismatch_count=3,
    max_abs_diff=0.25,
    k3=1e-4,
    observed=3,
    expected=4,
    boundaries={"embed_tokens": "equal", "layers.0.mlp.act": "origin", "norm": "receiver", "logsumexp": "unobserved"},
)


@pytest.mark.parametrize(
    ("opens", "shuts"),
    [
        (Rules(max_mismatch=3), Rules(max_mismatch=2)),
        (Rules(max_abs_diff=0.25), Rules(max_abs_diff=0.2)),
        (Rules(max_k3=1e-4), Rules(max_k3=1e-5)),
        (Rules(max_boundaries=2), Rules(max_boundaries=1)),
        (Rules(min_coverage=0.75), Rules(min_coverage=0.76)),
        (Rules(must_equal=("embed*",)), Rules(must_equal=("layers.*",))),
    ],
)
def test_every_rule_opens_and_shuts(opens: Rules, shuts: Rules) -> None:
    assert exit_code(judge(SUBJECT, opens)) == ExitCode.EQUAL
    broken = judge(SUBJECT, shuts)
    assert exit_code(broken) == ExitCode.DIVERGED
    assert [r.outcome for r in broken] == ["holds", "holds", "broken"]


@pytest.mark.parametrize(
    ("subject", "rules"),
    [
        (replace(SUBJECT, compared=0, mismatch_count=0), Rules(max_mismatch=0)),
        (SUBJECT, Rules(min_compared=101)),
        (SUBJECT, Rules(must_equal=("logsumexp",))),
        (SUBJECT, Rules(must_equal=("misspelt",))),
        (replace(SUBJECT, boundaries=None), Rules(max_boundaries=0)),
        (replace(SUBJECT, verdict="inconclusive"), Rules(max_mismatch=3)),
    ],
)
def test_what_was_not_seen_is_no_pass(subject: Subject, rules: Rules) -> None:
    assert exit_code(judge(subject, rules)) == ExitCode.INCONCLUSIVE


def test_a_nan_is_below_no_limit_and_another_object_is_judged_no_further() -> None:
    assert exit_code(judge(replace(SUBJECT, max_abs_diff=float("nan")), Rules(max_abs_diff=1e9))) == ExitCode.DIVERGED
    rulings = judge(replace(SUBJECT, verdict="not_comparable"), Rules(max_mismatch=0))
    assert len(rulings) == 1 and exit_code(rulings) == ExitCode.NOT_COMPARABLE


def test_junit_counts_and_escapes() -> None:
    hostile = replace(SUBJECT, name='a<b>&"\x00\x1b\ud800', properties={"x": "\x07"})
    text = junit([(hostile, judge(hostile, Rules(max_mismatch=0, must_equal=("logsumexp",)))), (SUBJECT, [])])
    root = ET.fromstring(text)
    assert {k: root.get(k) for k in ("tests", "failures", "errors")} == {"tests": "4", "failures": "1", "errors": "1"}
    suite = root[0]
    assert suite.get("name") == 'a<b>&"\ufffd\ufffd\ufffd'
    failure = suite.find("testcase/failure")
    assert failure is not None and failure.get("message") == "3 of 100 logprobs differ"


def test_two_traces_and_a_verdict_of_them(tmp_path: Path) -> None:
    pair(tmp_path, flip("logprobs", 2, 0))
    sides = ("--rollout", str(tmp_path / "left"), "--train", str(tmp_path / "right"))
    out, verdict = tmp_path / "out.xml", tmp_path / "v.json"
    done = rlk("gate", "--max-mismatch", "0", "--max-boundaries", "1", "--junit", str(out), *sides)
    assert done.code == ExitCode.DIVERGED, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == ["holds", "holds", "broken", "holds"]
    assert "1 of 5 logprobs differ" in lines[2]
    assert ET.parse(out).getroot().get("failures") == "1"
    rlk("compare", str(tmp_path / "left"), str(tmp_path / "right"), "--json", str(verdict))
    judged = tmp_path / "judged.json"
    done = rlk("gate", "--max-mismatch", "1", "--json", str(judged), str(verdict))
    assert done.code == ExitCode.EQUAL, done.err
    rules = json.loads(judged.read_text())["subjects"][0]["rules"]
    assert rules[-1] == {"rule": "mismatches at most 1", "outcome": "holds", "found": "1 of 5 logprobs differ"}


def step(number: int, mismatches: int = 0, **more: Any) -> str:
    figures = {"compared": 10, "mismatch_count": mismatches, "max_abs_diff": 0.5 * mismatches, "k3": 0.0}
    return json.dumps({"step": number, **figures, **more}) + "\n"


def test_a_run_of_grpo_is_judged_over_all_its_steps(tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    steps.write_text(step(1) + step(2, 4) + step(3) + '{"step": 4, "torn')
    done = rlk("gate", str(tmp_path))
    assert done.code == ExitCode.DIVERGED
    assert "4 of 30 logprobs differ" in done.out and "first in step 2" in done.out
    assert rlk("gate", "--max-mismatch", "4", "--max-abs-diff", "2", str(tmp_path)).code == ExitCode.EQUAL
    assert rlk("gate", "--min-coverage", "0.5", str(tmp_path)).code == ExitCode.INCONCLUSIVE
    steps.write_text("")
    assert rlk("gate", str(tmp_path)).code == ExitCode.INCONCLUSIVE


BAD = {
    "no JSON": ("{", "not valid JSON"),
    "another document": ("[1]", "Expected `object`"),
    "no verdict": ('{"schema": 1}', "missing required field"),
    "future": (
        '{"schema": 9, "verdict": "equal", "boundaries": [], "coverage": {"observed": 0, "expected": 0}}',
        "schema 9",
    ),
    "more differ than there are": (
        '{"schema": 1, "verdict": "equal", "boundaries": [], "coverage": {"observed": 0, "expected": 0},'
        ' "logprobs": {"compared": 1, "mismatch_count": 2, "max_abs_diff": 0, "k3": 0}}',
        "mismatch_count 2 of 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_verdict_is_refused(tmp_path: Path, name: str) -> None:
    text, words = BAD[name]
    path, out = tmp_path / "v.json", tmp_path / "out.xml"
    path.write_text(text)
    refused(rlk("gate", "--junit", str(out), str(path)), words)
    assert not out.exists()


def test_what_would_change_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(step(1))
    refused(rlk("gate", "--dtype", "float32", str(tmp_path)), "--dtype would change nothing")
    refused(rlk("gate", "--junit", str(tmp_path / "no" / "o.xml"), str(tmp_path)), "does not exist")
    (tmp_path / "steps.jsonl").write_text(step(2))
    refused(rlk("gate", str(tmp_path)), "line 1 is the record of step 2")
