"""An interrupted run of the library goes on where it stopped; another one starts anew."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from diffcheck.base.errors import InputError
from diffcheck.faults.cli import run_jobs
from diffcheck.faults.outcome import Outcome, scores
from diffcheck.faults.results import Results

FOUND = Outcome("a", "vllm, strict", "diverged", "logits", "diverged", "logits", ["order.k"], [], 1.25)
MISSED = Outcome("b", "vllm, strict", "diverged", "norm", "equal", "", [], ["verdict equal, expected diverged"], 0.5)


def test_what_was_found_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    first = Results(path, "rlk-diff faults --all")
    first.resume("vllm")
    first.add("vllm", FOUND)
    again = Results(path, "rlk-diff faults --all")
    again.resume("vllm")
    assert again.find("vllm", "a", "vllm, strict") == FOUND and again.find("vllm", "a", "vllm, native") is None
    again.add("vllm", MISSED)
    again.finish()
    section = json.loads(path.read_text())["engines"]["vllm"]
    assert (section["complete"], section["faults"], section["controls"]) == (True, 2, 0)
    assert (section["precision"], section["recall"]) == scores([FOUND, MISSED]) == (1.0, 0.5)
    assert section["versions"]["numpy"] and section["seconds"] == 1.8
    for results in (Results(path, "rlk-diff faults --all"), Results(path, "another command")):
        results.resume("vllm")
        assert results.outcomes["vllm"] == []


def test_an_interrupted_run_of_other_versions_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    first = Results(path, "rlk-diff faults --all")
    first.resume("vllm")
    first.add("vllm", FOUND)
    data = json.loads(path.read_text())
    data["engines"]["vllm"]["versions"]["numpy"] = "1.0"
    path.write_text(json.dumps(data))
    again = Results(path, "rlk-diff faults --all")
    again.resume("vllm")
    assert again.outcomes["vllm"] == []


def test_other_engines_sections_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    for engine in ("reference", "vllm"):
        results = Results(path, f"rlk-diff faults --all --engine {engine}")
        results.resume(engine)
        results.add(engine, FOUND)
        results.finish()
    assert list(json.loads(path.read_text())["engines"]) == ["reference", "vllm"]


@pytest.fixture
def listening() -> Iterator[None]:
    """Ctrl-C interrupts, as in a terminal: a shell starts its background jobs with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_outcome_of_an_interrupted_search_is_not_kept(tmp_path: Path, listening: None) -> None:
    """The search swallows Ctrl-C and answers with what it has; the library stops all the same."""

    def interrupted() -> Outcome:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return MISSED

    handler = signal.getsignal(signal.SIGINT)
    results = Results(tmp_path / "faults.json", "rlk-diff faults --all")
    results.resume("vllm")
    jobs = [("vllm", o.name, o.engine, run) for o, run in ((FOUND, lambda: FOUND), (MISSED, interrupted))]
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, results, lambda *_: None)
    assert results.outcomes["vllm"] == [FOUND] and signal.getsignal(signal.SIGINT) is handler
    jobs[1] = (*jobs[1][:3], lambda: MISSED)
    run_jobs([(jobs[0][0], FOUND.name, FOUND.engine, interrupted), jobs[1]], results, lambda *_: None)
    assert results.outcomes["vllm"] == [FOUND, MISSED]


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_foreign_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(InputError, match="holds no results"):
        Results(path, "")
