"""`import rlk`: the commands as functions, with texts or paths."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlk
from tests.diffcheck.in_process import rlk as command
from tests.diffcheck.synthetic import flip, pair


def test_two_traces_are_compared(tmp_path: Path) -> None:
    pair(tmp_path, flip("norm", 1))
    verdict = rlk.compare(str(tmp_path / "left"), tmp_path / "right")
    assert verdict.verdict == "diverged" and verdict.first_divergence is not None
    assert repr(verdict) == f"<Verdict diverged: {verdict.summary}>"
    verdict.summary = "<script>"
    assert "&lt;script&gt;" in verdict._repr_html_() and "<script>" not in verdict._repr_html_()
    assert rlk.compare(tmp_path / "left", rlk.Trace(str(tmp_path / "left")).folder).verdict == "equal"


def test_faults_are_errors_with_a_remedy(tmp_path: Path) -> None:
    for call in (
        lambda: rlk.compare(tmp_path / "none", tmp_path),
        lambda: rlk.localize(colour=1),
        lambda: rlk.contract("rms_norm", "no-such"),
        lambda: rlk.infer(tmp_path, "norm"),
        lambda: rlk.run_grpo(tmp_path / "x", resume=True),
    ):
        with pytest.raises(rlk.RlkError) as caught:
            call()
        assert caught.value.remedy
    assert rlk.contract("rms_norm").contract_id


def test_the_version_and_a_verdict_on_standard_output(tmp_path: Path) -> None:
    import json

    assert command("--version").out.strip() == f"rlk {rlk.__version__}"
    pair(tmp_path, lambda _: None)
    done = command("compare", str(tmp_path / "left"), str(tmp_path / "right"), "--json", "-")
    written = json.loads(done.out)
    assert done.code == 0 and written["verdict"] == "equal"
    repeat = written["evidence"]["repeat"]
    assert repeat["command"] and repeat["processor"] and repeat["rlk"] == rlk.__version__
    assert repeat["model"] is None and repeat["seed"] is None
    assert len(repeat["model_sha256"]) == len(repeat["samples_sha256"]) == 64
