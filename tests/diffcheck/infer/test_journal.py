"""A search that was stopped goes on where it was, and comes to the same answer as one that never was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffcheck.faults.laboratory import Laboratory
from diffcheck.infer import Inference, infer
from diffcheck.infer.trial import Trial
from diffcheck.trace.reader import Trace

NAME = "layers.0.input_layernorm"


class StoppedError(Exception):
    """Stands for whatever ends a process."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def trace(lab: Laboratory) -> Trace:
    return lab.run(())


@pytest.fixture(scope="module")
def whole(lab: Laboratory, trace: Trace) -> dict[str, Any]:
    """The answer of a search that nothing stopped."""
    return answered(infer(trace, NAME, lab.model, rows=8, probe=False))


def answered(answer: Inference) -> dict[str, Any]:
    return answer.to_json() | {"seconds": 0}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLK_CACHE", str(tmp_path))
    return tmp_path / "infer"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry a contract that was really computed."""
    calls: list[int] = []
    score = Trial.score

    def counted(self: Trial, *arguments: object) -> object:
        calls.append(1)
        return score(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Trial, "score", counted)
    yield calls


def stop_after(contracts: int, error: type[BaseException]) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, _total: int) -> None:
        if "contracts on 1 of" in what and done == contracts:
            raise error

    return progress


@pytest.mark.parametrize("error", [StoppedError, KeyboardInterrupt])
def test_a_stopped_search_goes_on(
    error: type[BaseException],
    lab: Laboratory,
    trace: Trace,
    whole: dict[str, Any],
    cache: Path,
    computed: list[int],
) -> None:
    assert answered(infer(trace, NAME, lab.model, rows=8, probe=False)) == whole
    alone = len(computed)
    assert whole["complete"] and not list(cache.glob("*")), "a search that ended keeps nothing"
    computed.clear()
    if error is KeyboardInterrupt:
        answer = infer(trace, NAME, lab.model, rows=8, probe=False, progress=stop_after(1000, error))
        assert answer.status == "inconclusive" and "run again, it goes on from there" in answer.reason
    else:
        with pytest.raises(error):
            infer(trace, NAME, lab.model, rows=8, probe=False, progress=stop_after(1000, error))
    first = len(computed)
    assert 1000 <= first < alone and len(list(cache.glob("*.jsonl"))) == 1
    again = infer(trace, NAME, lab.model, rows=8, probe=False)
    assert len(computed) <= alone + 16, "only the nearest misses of the stopped search were computed besides"
    assert len(computed) - first <= alone - 1000
    assert answered(again) == whole
    assert not list(cache.glob("*.jsonl"))


def test_a_torn_journal_loses_its_last_line_only(
    lab: Laboratory, trace: Trace, whole: dict[str, Any], cache: Path
) -> None:
    with pytest.raises(StoppedError):
        infer(trace, NAME, lab.model, rows=8, probe=False, progress=stop_after(500, StoppedError))
    (journal,) = cache.glob("*.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines)[:-4])
    with pytest.raises(StoppedError):
        infer(trace, NAME, lab.model, rows=8, probe=False, progress=stop_after(600, StoppedError))
    assert journal.read_bytes().splitlines(keepends=True)[: len(lines)] == lines
    assert answered(infer(trace, NAME, lab.model, rows=8, probe=False)) == whole


def test_another_question_has_another_journal(
    lab: Laboratory, trace: Trace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(of: Trace, name: str, rows: int) -> None:
        with pytest.raises(StoppedError):
            infer(of, name, lab.model, rows=rows, probe=False, progress=stop_after(5, StoppedError))

    stopped(trace, NAME, 64)
    stopped(trace, NAME, 64)
    assert len(list(cache.glob("*.jsonl"))) == 1
    stopped(trace, NAME, 32)
    stopped(trace, "norm", 64)
    stopped(lab.run((), weight_flips=(("model.embed_tokens.weight", 5, 3),)), NAME, 64)
    monkeypatch.setattr("diffcheck.infer.journal.code_version", lambda: "another")
    stopped(trace, NAME, 64)
    assert len(list(cache.glob("*.jsonl"))) == 5


def test_a_cache_that_cannot_be_written_keeps_nothing_and_stops_nothing(
    lab: Laboratory, trace: Trace, cache: Path
) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(StoppedError):
        infer(trace, NAME, lab.model, rows=8, probe=False, progress=stop_after(5, StoppedError))
    assert infer(trace, "layers.0.mlp.act", lab.model, probe=False).complete
