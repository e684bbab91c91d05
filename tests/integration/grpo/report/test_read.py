"""A run's folder, read back and held to itself; what is damaged is refused by file, line and field."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.errors import ExitCode, RlkError
from integration.grpo.report.read import RunError, read_run
from tests.integration.grpo.report import run_cases


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases.write(tmp_path_factory.mktemp("runs") / "run", 4)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_totals(whole: Path, tmp_path: Path) -> None:
    strict = read_run(whole)
    assert (len(strict.steps), strict.mismatches, strict.exit_code) == (4, 0, ExitCode.EQUAL)
    assert strict.samples == {"consumed": 24} and strict.mean_abs_diff == 0.0
    assert strict.names["nemo_rl"]["train/token_mult_prob_error"] == 1.0
    native = read_run(run_cases.write(tmp_path / "native", 3, mode="native", drift=0.25))
    assert native.mismatches == native.compared == sum(step["compared"] for step in native.steps)
    assert native.worst["step"] == 3 and native.worst["max_abs_diff"] == pytest.approx(0.75, rel=1e-6)
    assert native.exit_code is ExitCode.EQUAL
    assert read_run(run_cases.write(tmp_path / "broken", 2, drift=0.25)).exit_code is ExitCode.DIVERGED
    assert native.prompts[:3] == strict.prompts[:3]


def test_a_silent_fallback_is_no_equality(folder: Path) -> None:
    evidence = json.loads((folder / "evidence.json").read_text())
    (folder / "evidence.json").write_text(json.dumps({**evidence, "fallbacks": 1}))
    assert read_run(folder).exit_code is ExitCode.DIVERGED


def _edited(line: int, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: run_cases.edit_step(folder, line, **changes)


def _sql(statement: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with sqlite3.connect(folder / "samples.sqlite") as db:
            db.executescript(statement)

    return change


def _torn(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) * 2 // 3])

    return change


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a field is missing": (r"steps\.jsonl, line 2: field k3 is missing", _edited(2, k3=...)),
    "a field of the wrong type": (r"line 3: field compared is '7', expected a count", _edited(3, compared="7")),
    "a negative count": (r"line 1: field tokens is -1", _edited(1, tokens=-1)),
    "a bool for a count": (r"line 1: field compared is True", _edited(1, compared=True)),
    "null where a number must be": (r"line 1: field loss is None", _edited(1, loss=None)),
    "no seconds": (r"line 4: field seconds is not an object", _edited(4, seconds=[])),
    "a phase is missing": (r"line 4, seconds: field reward is missing", _edited(4, seconds={"rollout": 1.0})),
    "steps out of order": (r"line 2: field step is 3, expected 2", _edited(2, step=3)),
    "nothing compared": (r"line 2: field mismatch_count is 0 of 0", _edited(2, compared=0)),
    "more mismatches than tokens": (r"line 2: field mismatch_count is 999999", _edited(2, mismatch_count=999999)),
    "a mismatch made up": (r"line 2: field mismatch_count is 1, its samples give 0", _edited(2, mismatch_count=1)),
    "a difference made up": (r"field max_abs_diff is 0.5, its samples give 0.0", _edited(2, max_abs_diff=0.5)),
    "another run's samples": (r"line 1: field samples_digest is not that of", _edited(1, samples_digest="0" * 64)),
    "a torn line": (r"steps\.jsonl, line \d: not valid JSON", _torn("steps.jsonl")),
    "torn evidence": (r"evidence\.json: not valid JSON", _torn("evidence.json")),
    "a torn database": (r"samples\.sqlite", _torn("samples.sqlite")),
    "a sample is gone": (
        r"samples\.sqlite: step 2 holds 5 samples, 6 were planned",
        _sql("DELETE FROM samples WHERE id = 's000002-p01-g1'"),
    ),
    "one bit of a logprob": (
        r"line 3: field samples_digest",
        _sql("UPDATE samples SET train_logprobs = zeroblob(length(train_logprobs)) WHERE id = 's000003-p00-g0'"),
    ),
    "no steps": (r"steps\.jsonl: No such file", lambda folder: (folder / "steps.jsonl").unlink()),
    "empty steps": (r"holds no finished step", lambda folder: (folder / "steps.jsonl").write_text("") and None),
    "another schema": (
        r"evidence\.json: field schema is not 1",
        lambda folder: (folder / "evidence.json").write_text('{"schema": 2}') and None,
    ),
    "a torn configuration": (
        r"config\.json: not valid JSON",
        lambda folder: (folder / "config.json").write_text('{"model": ') and None,
    ),
    "evidence without fallbacks": (
        r"evidence\.json: field fallbacks is not a int",
        lambda folder: (
            (folder / "evidence.json").write_text(json.dumps({**run_cases.evidence("strict", 4), "fallbacks": None}))
            and None
        ),
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_refused_by_file_line_and_field(folder: Path, what: str) -> None:
    message, damage = DAMAGES[what]
    read_run(folder)
    damage(folder)
    with pytest.raises(RlkError, match=message) as found:
        read_run(folder)
    assert found.value.remedy


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"steps\.jsonl"):
        read_run(tmp_path)
