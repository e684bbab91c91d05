"""The exhaustive runner resumes, ignores stale results, and tabulates; the long run itself is behind its marker."""

from pathlib import Path

import numpy as np
import pytest

from tests.reference.exhaustive import __main__ as command
from tests.reference.exhaustive import oracle, runner
from tests.reference.exhaustive.subjects import SUBJECTS, Outcome, compare

pytestmark = pytest.mark.skipif(oracle.compiler() is None, reason="needs a C compiler")
SUBJECT = "cast/bfloat16/rne/infinity"


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SHARDS", 1 << 16)
    monkeypatch.setattr(runner, "CHUNK", 1 << 14)


@pytest.mark.usefixtures("small_shards")
def test_a_shard_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = runner.run_shard(SUBJECT, 0x3F80, "digest", tmp_path)
    assert (first.outcome.inputs, first.outcome.mismatches) == (1 << 16, 0)

    def refuse(x: object) -> Outcome:
        raise AssertionError("computed again")

    monkeypatch.setitem(SUBJECTS, SUBJECT, refuse)
    assert runner.run_shard(SUBJECT, 0x3F80, "digest", tmp_path) == first
    with pytest.raises(AssertionError, match="computed again"):
        runner.run_shard(SUBJECT, 0x3F80, "other code", tmp_path)


@pytest.mark.usefixtures("small_shards")
def test_an_interrupted_shard_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(x: object) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setitem(SUBJECTS, SUBJECT, interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.run_shard(SUBJECT, 7, "digest", tmp_path)
    assert runner.stored(SUBJECT, 7, "digest", tmp_path) is None and not list(tmp_path.rglob("*.json"))


@pytest.mark.usefixtures("small_shards")
def test_shards_cover_every_bit_pattern_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[int] = []

    def record(x: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Outcome:
        seen.extend(x.view(np.uint32).tolist())
        return Outcome(x.size)

    monkeypatch.setitem(SUBJECTS, SUBJECT, record)
    for shard in (0, 1, runner.SHARDS - 1):
        runner.run_shard(SUBJECT, shard, "digest", tmp_path)
    last = (1 << 32) - (1 << 16)
    assert seen == [*range(1 << 17), *range(last, 1 << 32)]


def test_digest_follows_code_but_not_prose() -> None:
    source = 'def f(x: int) -> int:\n    """Doc."""\n    return x + 1  # why\n'
    assert runner._code(source) == runner._code(source.replace("Doc.", "Other.").replace("# why", "# because"))
    assert runner._code(source) != runner._code(source.replace("+ 1", "+ 2"))
    assert runner.sources_digest("cast/x") != runner.sources_digest("exp/rlk")


def test_outcomes_merge() -> None:
    total = Outcome()
    total.merge(Outcome(10, 1, ["0x1"], 0.7, "0x1p0", 3, 10))
    total.merge(Outcome(5, 0, [], 0.8, "0x1p1", 1, 5))
    total.merge(Outcome(5, 2, ["0x2"]))
    assert total == Outcome(20, 3, ["0x1", "0x2"], 0.8, "0x1p1", 4, 15)


def test_a_mismatch_is_reported_by_its_input() -> None:
    x = np.array([1.0, 2.0, np.nan], np.float32)
    outcome = compare(x, x, np.array([1.0, 2.5, -np.nan], np.float32), nan_as_class=True)
    assert (outcome.mismatches, outcome.examples) == (1, ["0x40000000"])


def test_a_wrong_rounding_is_found() -> None:
    """The check can fail: truncation is not rounding to nearest."""
    from reference.formats import BFLOAT16, decode
    from reference.rounding import round_to

    x = np.arange(0x3F800000, 0x3F800000 + 65536, dtype=np.uint32).view(np.float32)
    wrong = decode(oracle.round_codes(x, BFLOAT16, "rtz", "infinity", None), BFLOAT16)
    assert compare(x, round_to(x, BFLOAT16), wrong, nan_as_class=True).mismatches > 30_000


def test_the_table_lists_complete_subjects_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (runner, command):
        monkeypatch.setattr(module, "SHARDS", 2)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "CHUNK", 1 << 31)
    monkeypatch.setitem(SUBJECTS, SUBJECT, lambda x: Outcome(x.size))
    monkeypatch.setattr(np, "arange", lambda first, last, dtype: np.zeros(4, np.uint64))
    runner.run_shard(SUBJECT, 0, runner.sources_digest(SUBJECT), tmp_path)
    assert f"| {SUBJECT} |" not in command.table()
    runner.run_shard(SUBJECT, 1, runner.sources_digest(SUBJECT), tmp_path)
    assert f"| {SUBJECT} | 8 | 0 |" in command.table()


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_float32_bit_pattern(subject: str) -> None:
    total = Outcome()
    for shard in runner.run(subject):
        total.merge(shard.outcome)
    assert total.mismatches == 0, total.examples
    assert total.inputs == 1 << 32 or subject.startswith("exp2_nonpositive")  # which takes no positive input
