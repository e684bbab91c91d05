"""The data buffer: no sample is lost, used twice or mixed up, in any order of calls and after any crash."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.grpo.buffer import Buffer, DataBufferError, sample_id, sample_seed
from integration.grpo.buffer.records import samples_digest
from tests.integration.grpo import buffer_cases as cases


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "samples.sqlite"


def states(buffer: Buffer, step: int) -> set[str]:
    return {sample.state for sample in buffer.samples(step)}


def test_a_step_from_plan_to_sync(path: Path) -> None:
    with cases.new(path) as buffer:
        planned = cases.plan(buffer, 1)
        assert [sample.id for sample in planned[:4]] == [
            "s000001-p00-g0",
            "s000001-p00-g1",
            "s000001-p00-g2",
            "s000001-p01-g0",
        ]
        assert planned[4].seed == sample_seed(cases.SEED, planned[4].id) and len({s.seed for s in planned}) == 6
        assert planned[3].prompt_token_ids.tolist() == [8, 9]
        buffer.generated([cases.generated(sample, 0) for sample in planned[:5]])
        assert buffer.steps()[0].state == "planned"
        buffer.generated([cases.generated(planned[5], 0)])
        assert buffer.steps()[0].state == "rolled_out"
        used = cases.learn(buffer, 1)
        assert [sample.id for sample in used] == [sample.id for sample in planned]
        assert buffer.steps()[0].state == "synced" and states(buffer, 1) == {"consumed"}
        buffer.check()
    with Buffer.open(path, read_only=True) as reader:
        for sample in reader.samples(1):
            tokens, logprobs = cases.response(sample)
            assert sample.response_token_ids is not None and sample.response_token_ids.tolist() == tokens
            assert sample.rollout_logprobs is not None
            assert sample.rollout_logprobs.view(np.uint32).tolist() == logprobs.view(np.uint32).tolist()
        assert [w.digest for w in reader.weights()] == ["w0", "w1"]


FORBIDDEN: dict[str, tuple[str, Callable[[Buffer], object]]] = {
    "generated twice": (
        "s000001-p00-g0 is consumed, wanted generated",
        lambda b: b.generated([cases.generated(b.samples(1)[0], 0)]),
    ),
    "rewarded before it is generated": (
        "s000003-p01-g0 is planned, wanted rewarded",
        lambda b: b.rewarded({"s000003-p01-g0": 1.0}),
    ),
    "scored before it is rewarded": (
        "s000002-p00-g1 is generated, wanted scored",
        lambda b: b.scored([cases.scored(b.samples(2)[1])], 1),
    ),
    "consumed before it is scored": ("s000002-p00-g0 is generated, wanted consumed", lambda b: b.consume(2)),
    "consumed twice": ("s000001-p00-g0 is consumed, wanted consumed", lambda b: b.consume(1)),
    "synced before it is updated": ("step 2 is rolled_out, wanted synced", lambda b: b.synced(2, 2, "w2")),
    "synced twice": ("weight version 1 is there already", lambda b: b.synced(1, 1, "w1")),
    "planned twice": ("step 1 cannot be planned: the last one is step 3", lambda b: cases.plan(b, 1)),
    "planned ahead": ("step 5 cannot be planned", lambda b: cases.plan(b, 5)),
    "planned for unknown weights": ("FOREIGN KEY", lambda b: cases.plan(b, 4, version=9)),
    "an empty prompt": ("an empty prompt", lambda b: b.plan(4, [[1], []], 2, rollout_version=1, seed=0)),
    "no prompt": ("0 prompts", lambda b: b.plan(4, [], 2, rollout_version=1, seed=0)),
    "a negative token": ("negative", lambda b: b.plan(4, [[-1]], 2, rollout_version=1, seed=0)),
    "a token of 33 bits": ("32 bits", lambda b: b.plan(4, [[1 << 32]], 2, rollout_version=1, seed=0)),
    "an unknown sample": ("s000009-p00-g0 was never planned", lambda b: b.rewarded({"s000009-p00-g0": 1.0})),
    "other weights": (
        "s000003-p00-g0 is of weight version 0, its step of 1",
        lambda b: b.generated([cases.generated(b.samples(3)[0], 0)]),
    ),
    "an empty response": (
        "s000003-p00-g0: token ids are not a non-empty row",
        lambda b: b.generated(
            [replace(cases.generated(b.samples(3)[0], 1), response_token_ids=[], rollout_logprobs=np.empty(0, "f4"))]
        ),
    ),
    "a logprob too few": (
        "s000003-p00-g0: 1 rollout_logprobs for 2 tokens",
        lambda b: b.generated(
            [
                replace(
                    cases.generated(b.samples(3)[0], 1), response_token_ids=[4, 5], rollout_logprobs=np.zeros(1, "f4")
                )
            ]
        ),
    ),
    "logprobs in float64": (
        "rollout_logprobs are float64",
        lambda b: b.generated(
            [replace(cases.generated(b.samples(3)[0], 1), response_token_ids=[4], rollout_logprobs=np.zeros(1))]
        ),
    ),
    "a reward of NaN": ("s000002-p00-g0: reward is nan", lambda b: b.rewarded({"s000002-p00-g0": float("nan")})),
    "a consumed sample aborted": ("is consumed, wanted aborted", lambda b: b.abort(["s000001-p00-g0"], "abort")),
    "a sample retried that was not aborted": ("is generated, wanted planned", lambda b: b.retry(["s000002-p00-g0"])),
    "rewound to a step that was not synced": ("it is rolled_out, wanted synced", lambda b: b.rewind(2)),
    "rewound to an unknown step": ("it is unknown, wanted synced", lambda b: b.rewind(8)),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_is_forbidden_names_sample_state_and_wanted_state_and_changes_nothing(path: Path, what: str) -> None:
    message, call = FORBIDDEN[what]
    with cases.new(path) as buffer:
        cases.run(buffer, 1, 1)
        cases.roll_out(buffer, 2)
        cases.plan(buffer, 3, version=1)
        before = list(buffer._connection.iterdump())
        with pytest.raises(DataBufferError, match=message) as found:
            call(buffer)
        assert str(path) in found.value.cause and found.value.remedy
        assert list(buffer._connection.iterdump()) == before
        buffer.check()


def test_one_bad_record_stores_none_of_its_call(path: Path) -> None:
    with cases.new(path) as buffer:
        planned = cases.plan(buffer, 1)
        records = [cases.generated(sample, 0) for sample in planned]
        with pytest.raises(DataBufferError):
            buffer.generated([*records[:-1], replace(records[-1], weight_version=3)])
        assert states(buffer, 1) == {"planned"}


def test_a_step_is_scored_by_one_version(path: Path) -> None:
    with cases.new(path) as buffer:
        cases.run(buffer, 1, 1)
        cases.roll_out(buffer, 2)
        buffer.rewarded({sample.id: 0.0 for sample in buffer.samples(2)})
        first, second, *_ = [cases.scored(sample) for sample in buffer.samples(2)]
        buffer.scored([first], 1)
        with pytest.raises(DataBufferError, match="s000002-p00-g1 is scored by version 0, others by 1"):
            buffer.scored([second], 0)


def test_an_aborted_sample_leaves_its_step_or_comes_back(path: Path) -> None:
    with cases.new(path) as buffer:
        cases.roll_out(buffer, 1)
        lost, back = "s000001-p00-g0", "s000001-p01-g2"
        seed = buffer.samples(1)[-1].seed
        buffer.abort([lost, back], "aborted by the engine")
        assert buffer.steps()[0].state == "rolled_out", "the others hold the step where it was"
        buffer.retry([back])
        assert buffer.steps()[0].state == "planned"
        retried = buffer.samples(1)[-1]
        assert (retried.state, retried.seed, retried.response_token_ids) == ("planned", seed, None)
        buffer.generated([cases.generated(retried, 0)])
        left = [sample.id for sample in buffer.samples(1, ("generated",))]
        buffer.rewarded(dict.fromkeys(left, 1.0))
        buffer.scored([cases.scored(sample) for sample in buffer.samples(1, ("rewarded",))], 0)
        assert [sample.id for sample in buffer.consume(1)] == left and len(left) == 5
        with pytest.raises(DataBufferError, match=f"{lost} cannot be planned again"):
            buffer.retry([lost])
        buffer.check()
        cases.plan(buffer, 2, version=0)
        buffer.abort([sample.id for sample in buffer.samples(2)], "all")
        with pytest.raises(DataBufferError, match="step 2 is planned, wanted updated"):
            buffer.consume(2)


def test_a_step_goes_on_when_its_last_straggler_is_aborted(path: Path) -> None:
    with cases.new(path) as buffer:
        last, *others = cases.plan(buffer, 1)
        buffer.generated([cases.generated(sample, 0) for sample in others])
        assert buffer.steps()[0].state == "planned"
        buffer.abort([last.id], "too slow")
        assert buffer.steps()[0].state == "rolled_out"
        buffer.rewarded({sample.id: 1.0 for sample in others})
        assert buffer.steps()[0].state == "rewarded"


def test_steps_are_updated_one_after_another(path: Path) -> None:
    """Step 2 is scored with the weights that step 1 has yet to leave: the trainer would apply them in another order."""
    with cases.new(path) as buffer:
        for step in (1, 2):
            cases.roll_out(buffer, step, version=0)
            buffer.rewarded({sample.id: 1.0 for sample in buffer.samples(step)})
            buffer.scored([cases.scored(sample) for sample in buffer.samples(step)], 0)
        with pytest.raises(DataBufferError, match="step 2 cannot be updated: step 1 is scored"):
            buffer.consume(2)
        assert states(buffer, 2) == {"scored"}
        buffer.consume(1)
        assert len(buffer.consume(2)) == len(buffer.samples(2))


def test_rewinding_and_running_again_gives_the_same_bits(path: Path, tmp_path: Path) -> None:
    with cases.new(path) as buffer, cases.new(tmp_path / "other.sqlite") as straight:
        cases.run(straight, 1, 6)
        cases.run(buffer, 1, 4)
        cases.roll_out(buffer, 5)
        buffer.rewind(3)
        buffer.check()
        assert [step.step for step in buffer.steps()] == [1, 2, 3] and buffer.weights()[-1].version == 3
        cases.run(buffer, 4, 6)
        assert list(buffer._connection.iterdump()) == list(straight._connection.iterdump())
        digests = [samples_digest(buffer.samples(step)) for step in range(1, 7)]
        assert len(set(digests)) == 6 and digests[2] == samples_digest(reversed(straight.samples(3)))
        buffer.rewind(0)
        assert not buffer.steps() and [w.version for w in buffer.weights()] == [0]


def test_one_step_off_rollouts_survive_a_rewind_if_their_weights_do(path: Path) -> None:
    with cases.new(path) as buffer:
        cases.roll_out(buffer, 1, version=0)
        for step in (1, 2, 3):
            cases.roll_out(buffer, step + 1, version=step - 1)
            cases.learn(buffer, step)
        early = samples_digest(buffer.samples(3)), samples_digest(buffer.samples(4))
        buffer.rewind(2, keep_rollouts=True)
        buffer.check()
        # Step 3 was rolled out by version 1, step 4 by version 2: both remain, what followed their rollout does not.
        assert [(step.step, step.state) for step in buffer.steps()][2:] == [(3, "rolled_out"), (4, "rolled_out")]
        assert all(s.reward is None and s.train_logprobs is None for s in buffer.samples(3))
        cases.learn(buffer, 3)
        assert samples_digest(buffer.samples(3)) == early[0]
        buffer.rewind(1, keep_rollouts=True)
        assert [(step.step, step.state) for step in buffer.steps()][1:] == [(2, "rolled_out"), (3, "rolled_out")]
        buffer.check()


CORRUPTIONS = {
    "step 1 holds 5 samples, 6 were planned": "DELETE FROM samples WHERE id = 's000001-p01-g2'",
    "step 2 has no prompt 0 group 0: that sample is lost": (
        "UPDATE samples SET id = 's000002-p07-g0', prompt_index = 7 WHERE id = 's000002-p00-g0'"
    ),
    "does not bear the name of its step": "UPDATE samples SET id = 's000001-p09-g9' WHERE id = 's000001-p01-g2'",
    "is of weight version 0, its step 2 of 1": "UPDATE samples SET weight_version = 0 WHERE id = 's000002-p00-g0'",
    "used twice, or left over": "UPDATE samples SET state = 'scored' WHERE id = 's000001-p00-g0'",
    "sample s000003-p00-g0 is consumed, its step 3 is rolled_out": (
        "UPDATE samples SET state = 'consumed', reward = 0, advantage = 0, train_logprobs = rollout_logprobs "
        "WHERE id = 's000003-p00-g0'"
    ),
    "without a sample in it": "UPDATE samples SET state = 'aborted' WHERE step = 2",
    "the step is ahead of it": "UPDATE steps SET state = 'rewarded' WHERE step = 3",
    "without the version that scored it": "UPDATE steps SET train_version = NULL WHERE step = 2",
    "step 3 is there, step 2 before it is not": "DELETE FROM samples WHERE step = 2; DELETE FROM steps WHERE step = 2",
    "synced without the weights": (
        "DELETE FROM samples WHERE step = 3; DELETE FROM steps WHERE step = 3; DELETE FROM weights WHERE step = 2"
    ),
    "its row of table weights is missing": "DELETE FROM weights WHERE step = 1",
    "its row of table steps is missing": "DELETE FROM steps WHERE step = 3",
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_the_audit_finds_what_somebody_else_did_to_the_file(path: Path, message: str) -> None:
    with cases.new(path) as buffer:
        cases.run(buffer, 1, 2)
        cases.roll_out(buffer, 3)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA foreign_keys = OFF")
        db.executescript(CORRUPTIONS[message])
    with Buffer.open(path) as buffer, pytest.raises(DataBufferError, match=message) as found:
        buffer.check()
    assert str(path) in found.value.cause


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE samples SET state = 'lost' WHERE id = 's000001-p00-g0'",
        "UPDATE samples SET rollout_logprobs = zeroblob(400) WHERE id = 's000001-p00-g0'",
        "UPDATE samples SET train_logprobs = NULL WHERE id = 's000001-p00-g0'",
        "UPDATE samples SET group_index = 1 WHERE id = 's000001-p00-g0'",
        "UPDATE samples SET response_token_ids = NULL WHERE id = 's000001-p00-g0'",
    ],
)
def test_the_schema_itself_refuses_half_a_sample(path: Path, statement: str) -> None:
    with cases.new(path) as buffer:
        cases.run(buffer, 1, 1)
    with sqlite3.connect(path) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute(statement)


def test_damaged_foreign_missing_and_held_files_are_refused_by_name(path: Path, tmp_path: Path) -> None:
    with cases.new(path) as buffer:
        cases.run(buffer, 1, 3)
        with pytest.raises(DataBufferError, match="another run is writing it"):
            Buffer.open(path)
        with Buffer.open(path, read_only=True) as reader:
            assert len(reader.steps()) == 3
            with pytest.raises(DataBufferError, match="readonly"):
                reader.rewind(1)
    whole = path.read_bytes()
    torn = tmp_path / "torn.sqlite"
    torn.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataBufferError, match=r"torn\.sqlite"), Buffer.open(torn) as buffer:
        buffer.check()
    middle = tmp_path / "middle.sqlite"
    middle.write_bytes(whole[:8192] + b"\xa5" * 4096 + whole[12288:])
    with pytest.raises(DataBufferError, match=r"middle\.sqlite: "), Buffer.open(middle) as buffer:
        buffer.check()
    foreign = tmp_path / "foreign.sqlite"
    foreign.write_bytes(b"not a database, but long enough to be one" * 50)
    for file in (foreign, tmp_path / "none.sqlite"):
        with pytest.raises(DataBufferError, match=file.name):
            Buffer.open(file, read_only=True)
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE something (x)")
    with pytest.raises(DataBufferError, match="no data buffer of version 1"):
        Buffer.open(tmp_path / "other.sqlite")
    with pytest.raises(DataBufferError, match="No such file"):
        Buffer.open(tmp_path / "no folder" / "samples.sqlite")


def test_a_reader_audits_a_buffer_that_is_being_written(path: Path) -> None:
    with cases.new(path) as buffer:
        cases.run(buffer, 1, 2)
        with Buffer.open(path, read_only=True) as reader:
            for step in range(3, 9):
                cases.roll_out(buffer, step)
                reader.check()
                cases.learn(buffer, step)
                reader.check()
            assert len(reader.steps()) == 8 and len(reader.samples(8, ("consumed",))) == 6


def test_a_full_disk_is_named_and_loses_nothing(path: Path) -> None:
    with cases.new(path) as buffer:
        cases.run(buffer, 1, 2)
        (pages,) = buffer._connection.execute("PRAGMA page_count").fetchone()
        buffer._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(DataBufferError, match="full") as found:
            cases.run(buffer, 3, 60)
        assert "free some space" in found.value.remedy and str(path) in found.value.cause
        buffer.check()
        reached = len(buffer.steps())
        buffer._connection.execute("PRAGMA max_page_count = 100000")
        buffer.rewind(2)
        cases.run(buffer, 3, reached + 1)
        buffer.check()


WRITER = """
import sys
from pathlib import Path
from tests.integration.grpo import buffer_cases as cases

with cases.new(Path(sys.argv[1])) as buffer:
    step = 1
    while True:
        cases.run(buffer, step, step)
        print(step, flush=True)
        step += 1
"""


def test_killed_in_the_middle_of_writing_it_stays_whole(tmp_path: Path) -> None:
    rng = random.Random(3)
    for round_ in range(4):
        path = tmp_path / f"{round_}.sqlite"
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as child:
            assert child.stdout is not None
            told = 0
            for line in child.stdout:
                told = int(line)
                if told == 1 + round_:
                    break
            time.sleep(rng.uniform(0, 0.05))
            os.kill(child.pid, signal.SIGKILL)
            told = int([str(told), *child.stdout.read().split()][-1])
        with Buffer.open(path) as buffer:
            buffer.check()
            synced = [step.step for step in buffer.steps() if step.state == "synced"]
            # What was committed is there, and at most one step is on its way.
            assert synced == list(range(1, len(synced) + 1)) and len(synced) in (told, told + 1)
            assert len(buffer.steps()) <= len(synced) + 1
            buffer.rewind(len(synced))
            cases.run(buffer, len(synced) + 1, len(synced) + 2)
            buffer.check()


OUT_OF_ORDER = ["plan", "generate", "reward", "score", "consume", "sync", "abort", "retry", "rewind", "reopen"]
CALLS = (*OUT_OF_ORDER, *["due"] * 25)
#: Which samples of a step a call is about.
MASKS = (0b111111, 0b111111, 0b111111, 0b010101, 0b101010, 0b000001, 0)
DUE = {"planned": "generate", "rolled_out": "reward", "rewarded": "score", "scored": "consume", "updated": "sync"}
INTERLEAVING = st.lists(
    st.tuples(st.sampled_from(CALLS), st.integers(0, 5), st.sampled_from(MASKS)), min_size=30, max_size=80
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=INTERLEAVING)
def test_no_interleaving_loses_or_reuses_a_sample(tmp_path_factory: pytest.TempPathFactory, calls: object) -> None:
    assert isinstance(calls, list)
    path = tmp_path_factory.mktemp("buffer") / "samples.sqlite"
    buffer = cases.new(path)
    consumed: dict[str, int] = {}
    try:
        for call, number, mask in calls:
            last = len(buffer.steps())
            # Mostly the step that is due, sometimes another.
            due = 1 + sum(step.state == "synced" for step in buffer.steps())
            step = min(due, max(1, last)) if number or call == "due" else 1
            version = buffer.weights()[-1].version
            rolled_out_by = buffer.steps()[step - 1].rollout_version if step <= last else version
            here = buffer.samples(step)
            some = [sample for i, sample in enumerate(here) if mask >> i & 1]
            if call == "due":
                call = DUE[buffer.steps()[step - 1].state] if due <= last else "plan"
            try:
                if call == "plan":
                    cases.plan(buffer, last + 1, version)
                elif call == "generate":
                    buffer.generated([cases.generated(s, rolled_out_by) for s in some])
                elif call == "reward":
                    buffer.rewarded({sample.id: 1.0 for sample in some})
                elif call == "score":
                    buffer.scored([cases.scored(sample) for sample in some if sample.rollout_logprobs is not None], 0)
                elif call == "consume":
                    for sample in buffer.consume(step):
                        assert sample.id not in consumed, "used twice"
                        consumed[sample.id] = step
                elif call == "sync":
                    buffer.synced(step, version + 1, f"w{version + 1}")
                elif call == "abort":
                    buffer.abort([sample.id for sample in some], "test")
                elif call == "retry":
                    buffer.retry([sample.id for sample in some])
                elif call == "rewind":
                    buffer.rewind(number % (last + 1), keep_rollouts=mask == 0)
                    consumed = {name: of for name, of in consumed.items() if of <= number % (last + 1)}
                else:
                    buffer.close()
                    buffer = Buffer.open(path)
            except DataBufferError:
                pass
            buffer.check()
            planned = {sample_id(s, p, g) for s in range(1, len(buffer.steps()) + 1) for p in (0, 1) for g in range(3)}
            found = {s.id: s.state for step in buffer.steps() for s in buffer.samples(step.step)}
            assert set(found) == planned, "lost"
            assert {name for name, state in found.items() if state == "consumed"} == set(consumed)
    finally:
        buffer.close()
