"""The data buffer: every sample's life in one SQLite file, from the plan to the update that consumes it.

    planned -> generated -> rewarded -> scored -> consumed            aborted from any but consumed; back by `retry`
    planned -> rolled_out -> rewarded -> scored -> updated -> synced  the step, as far as its last sample

Every call is one transaction: it happens as a whole or, after a crash, not at all. A transition that is not in the
picture is refused by sample, state and wanted state.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from integration.grpo.buffer.file import BufferFile, DataBufferError
from integration.grpo.buffer.records import COLUMNS, Buffered, Generated, Scored, Step, TokenIds, Weights
from integration.grpo.buffer.schema import audit

#: What a step's state is when this is the state of its sample that is furthest behind.
_STEP_STATE = {"planned": "planned", "generated": "rolled_out", "rewarded": "rewarded", "scored": "scored"}
_ABORTABLE = ("planned", "generated", "rewarded", "scored")


def sample_id(step: int, prompt: int, group: int) -> str:
    """Name of a sample; the same in every run of a configuration."""
    return f"s{step:06d}-p{prompt:02d}-g{group}"


def sample_seed(seed: int, sample: str) -> int:
    """Seed of one sample's draws, 63 bits: of the run's seed and the sample's name only, wherever it is generated."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample}".encode()).digest()[:8], "big") >> 1


class Buffer(BufferFile):
    """Reader and, unless ``read_only``, the one writer of a buffer. Use `open`; close it, or use it as a context."""

    def add_weights(self, version: int, step: int, digest: str) -> None:
        """Record weights made by the update of ``step``; 0 is what the run began with."""
        with self._transaction() as db:
            self._add_weights(db, version, step, digest)

    def plan(
        self, step: int, prompts: Sequence[Sequence[int]], group_size: int, *, rollout_version: int, seed: int
    ) -> list[Buffered]:
        """Plan the next step: ``group_size`` samples of each prompt, to be rolled out with ``rollout_version``.

        Args:
            prompts: token ids of each prompt.
            seed: of the run; each sample gets `sample_seed` of it.

        Returns:
            The samples, by prompt, then group.

        Raises:
            DataBufferError: steps are not planned one after another, a prompt is empty, or the weights are unknown.
        """
        if not prompts or group_size < 1 or any(len(prompt) == 0 for prompt in prompts):
            raise self._refused(f"step {step}: {len(prompts)} prompts in groups of {group_size}, or an empty prompt")
        with self._transaction() as db:
            (last,) = db.execute("SELECT COALESCE(MAX(step), 0) FROM steps").fetchone()
            if step != last + 1:
                raise self._refused(f"step {step} cannot be planned: the last one is step {last}")
            db.execute(
                "INSERT INTO steps (step, state, samples, rollout_version) VALUES (?, 'planned', ?, ?)",
                (step, len(prompts) * group_size, rollout_version),
            )
            for p, prompt in enumerate(prompts):
                tokens = self._tokens(f"step {step}, prompt {p}", prompt)
                for g in range(group_size):
                    name = sample_id(step, p, g)
                    db.execute(
                        "INSERT INTO samples (id, step, prompt_index, group_index, state, prompt_token_ids, seed) "
                        "VALUES (?, ?, ?, ?, 'planned', ?, ?)",
                        (name, step, p, g, tokens, sample_seed(seed, name)),
                    )
        return self.samples(step)

    def generated(self, records: Iterable[Generated]) -> None:
        """Store responses, planned -> generated; a step may come in several calls.

        Raises:
            DataBufferError: also where a response is empty, the number of logprobs is not that of its tokens, or other
                weights made it than the step was planned for. Nothing is stored then.
        """
        with self._transaction() as db:
            for record in records:
                tokens = self._tokens(record.id, record.response_token_ids)
                logprobs = self._logprobs(record.id, "rollout_logprobs", record.rollout_logprobs, len(tokens) // 4)
                planned = db.execute(
                    "SELECT rollout_version FROM steps JOIN samples USING (step) WHERE id = ?", (record.id,)
                ).fetchone()
                if planned is not None and planned[0] != record.weight_version:
                    raise self._refused(
                        f"sample {record.id} is of weight version {record.weight_version}, its step of {planned[0]}"
                    )
                self._move(
                    db,
                    record.id,
                    "planned",
                    "generated",
                    response_token_ids=tokens,
                    rollout_logprobs=logprobs,
                    finish_reason=record.finish_reason,
                    weight_version=record.weight_version,
                )
            self._advance(db)

    def rewarded(self, rewards: Mapping[str, float]) -> None:
        """Store rewards by sample id, generated -> rewarded.

        Raises:
            DataBufferError: also where a reward is not finite.
        """
        with self._transaction() as db:
            for name, reward in rewards.items():
                self._move(db, name, "generated", "rewarded", reward=self._finite(name, "reward", reward))
            self._advance(db)

    def scored(self, records: Iterable[Scored], train_version: int) -> None:
        """Store recomputed logprobs and advantages, rewarded -> scored.

        Raises:
            DataBufferError: also where the number of logprobs is not that of the response, or one step is scored with
                two versions.
        """
        with self._transaction() as db:
            for record in records:
                found = db.execute(
                    "SELECT length(response_token_ids) / 4, train_version, step FROM samples JOIN steps USING (step) "
                    "WHERE id = ?",
                    (record.id,),
                ).fetchone()
                length, version, step = found or (None, None, None)
                if version not in (None, train_version):
                    raise self._refused(f"sample {record.id} is scored by version {train_version}, others by {version}")
                self._move(
                    db,
                    record.id,
                    "rewarded",
                    "scored",
                    train_logprobs=self._logprobs(record.id, "train_logprobs", record.train_logprobs, length),
                    advantage=self._finite(record.id, "advantage", record.advantage),
                )
                db.execute("UPDATE steps SET train_version = ? WHERE step = ?", (train_version, step))
            self._advance(db)

    def consume(self, step: int) -> list[Buffered]:
        """Give all scored samples of ``step`` to one update, scored -> consumed; the step is then updated.

        Raises:
            DataBufferError: a sample is not scored yet, or was consumed before; no sample is left; or the step before
                was not updated.
        """
        with self._transaction() as db:
            for name, state in db.execute("SELECT id, state FROM samples WHERE step = ? ORDER BY id", (step,)):
                if state not in ("scored", "aborted"):
                    raise self._forbidden(name, state, "consumed")
            earlier = db.execute("SELECT state FROM steps WHERE step = ?", (step - 1,)).fetchone()
            if earlier is not None and earlier[0] not in ("updated", "synced"):
                raise self._refused(f"step {step} cannot be updated: step {step - 1} is {earlier[0]}")
            self._move_step(db, step, "scored", "updated")
            db.execute("UPDATE samples SET state = 'consumed' WHERE step = ? AND state = 'scored'", (step,))
        return self.samples(step, ("consumed",))

    def synced(self, step: int, version: int, digest: str) -> None:
        """Record that the weights of ``step``'s update, with their digest, are live; updated -> synced."""
        with self._transaction() as db:
            self._add_weights(db, version, step, digest)
            self._move_step(db, step, "updated", "synced")

    def abort(self, ids: Iterable[str], reason: str) -> None:
        """Take samples out of their step; what they have stays, ``reason`` becomes their finish_reason."""
        with self._transaction() as db:
            for name in ids:
                self._move(db, name, _ABORTABLE, "aborted", finish_reason=reason)
            self._advance(db)

    def retry(self, ids: Iterable[str]) -> None:
        """Plan aborted samples again, empty and with the same seed, in a step that was not updated."""
        empty = dict.fromkeys(COLUMNS[COLUMNS.index("weight_version") : COLUMNS.index("seed")])
        del empty["prompt_token_ids"]
        with self._transaction() as db:
            for name in ids:
                self._move(db, name, "aborted", "planned", **empty)
            self._advance(db)
            done = db.execute(
                "SELECT id FROM samples JOIN steps USING (step) "
                "WHERE samples.state = 'planned' AND steps.state IN ('updated', 'synced')"
            ).fetchone()
            if done is not None:
                raise self._refused(f"sample {done[0]} cannot be planned again: its step was updated without it")

    def rewind(self, to_step: int, *, keep_rollouts: bool = False) -> None:
        """Forget what came after ``to_step``'s update, for a run that resumes from that step's checkpoint.

        Args:
            to_step: 0 forgets every step.
            keep_rollouts: later steps that were rolled out whole, with weights that remain, go back to rolled_out
                instead: one-step-off rollouts could not be made again.

        Raises:
            DataBufferError: ``to_step`` was not synced.
        """
        with self._transaction() as db:
            found = db.execute("SELECT state FROM steps WHERE step = ?", (to_step,)).fetchone()
            if to_step and (found is None or found[0] != "synced"):
                state = "unknown" if found is None else found[0]
                raise self._refused(f"cannot rewind to step {to_step}: it is {state}, wanted synced")
            kept = to_step
            while keep_rollouts and _rolled_out(db, kept + 1, to_step):
                kept += 1
            db.execute("DELETE FROM samples WHERE step > ?", (kept,))
            db.execute("DELETE FROM steps WHERE step > ?", (kept,))
            db.execute("UPDATE steps SET state = 'rolled_out', train_version = NULL WHERE step > ?", (to_step,))
            db.execute(
                "UPDATE samples SET state = 'generated', reward = NULL, train_logprobs = NULL, advantage = NULL "
                "WHERE step > ? AND state != 'aborted'",
                (to_step,),
            )
            db.execute("DELETE FROM weights WHERE step > ?", (to_step,))

    def clear(self) -> None:
        """Forget everything."""
        with self._transaction() as db:
            for table in ("samples", "steps", "weights"):
                db.execute(f"DELETE FROM {table}")

    def samples(self, step: int, states: Collection[str] | None = None) -> list[Buffered]:
        """Samples of ``step``, by prompt, then group; only those in ``states``, if given."""
        with self._errors():
            rows = self._connection.execute(
                f"SELECT {', '.join(COLUMNS)} FROM samples WHERE step = ? ORDER BY prompt_index, group_index", (step,)
            )
            return [sample for row in rows if (sample := Buffered.of(row)) and (not states or sample.state in states)]

    def steps(self) -> list[Step]:
        """All steps in order."""
        with self._errors():
            rows = self._connection.execute(
                "SELECT step, state, samples, rollout_version, train_version FROM steps ORDER BY step"
            )
            return [Step(*row) for row in rows]

    def weights(self) -> list[Weights]:
        """All weight versions in order."""
        with self._errors():
            rows = self._connection.execute("SELECT version, step, digest FROM weights ORDER BY version")
            return [Weights(*row) for row in rows]

    def check(self) -> None:
        """Audit the whole file.

        Raises:
            DataBufferError: it is damaged; or a sample is lost, there twice, half there, consumed by no update or left
                over by one, or of other weights than its step says.
        """
        with self._transaction("DEFERRED") as db:
            # One snapshot: a writer may be at work.
            for problem in audit(db):
                raise DataBufferError(f"{self.path}: {problem}", "restore the file from a copy, or resume a checkpoint")

    def _move(
        self, db: sqlite3.Connection, name: str, source: str | tuple[str, ...], target: str, **values: object
    ) -> None:
        """Sample ``name`` from a state of ``source`` to ``target``, with new ``values`` of its columns."""
        found = db.execute("SELECT state FROM samples WHERE id = ?", (name,)).fetchone()
        if found is None:
            raise self._refused(f"sample {name} was never planned, wanted {target}")
        if found[0] not in ((source,) if isinstance(source, str) else source):
            raise self._forbidden(name, found[0], target)
        columns = ", ".join(f"{column} = ?" for column in ("state", *values))
        db.execute(f"UPDATE samples SET {columns} WHERE id = ?", (target, *values.values(), name))

    def _move_step(self, db: sqlite3.Connection, step: int, source: str, target: str) -> None:
        found = db.execute("SELECT state FROM steps WHERE step = ?", (step,)).fetchone()
        if found is None or found[0] != source:
            state = "unknown" if found is None else found[0]
            raise self._refused(f"step {step} is {state}, wanted {target}, which follows {source}")
        db.execute("UPDATE steps SET state = ? WHERE step = ?", (target, step))

    def _advance(self, db: sqlite3.Connection) -> None:
        """Bring steps to the state of their samples."""
        for step, state in db.execute(
            "SELECT step, state FROM steps WHERE state NOT IN ('updated', 'synced')"
        ).fetchall():
            present = {row[0] for row in db.execute("SELECT DISTINCT state FROM samples WHERE step = ?", (step,))}
            behind = next((_STEP_STATE[name] for name in _STEP_STATE if name in present), "planned")
            if behind != state:
                db.execute("UPDATE steps SET state = ? WHERE step = ?", (behind, step))

    def _add_weights(self, db: sqlite3.Connection, version: int, step: int, digest: str) -> None:
        if db.execute("SELECT 1 FROM weights WHERE version = ?", (version,)).fetchone():
            raise self._refused(f"weight version {version} is there already")
        db.execute("INSERT INTO weights (version, step, digest) VALUES (?, ?, ?)", (version, step, digest))

    def _tokens(self, what: str, tokens: Sequence[int] | TokenIds) -> bytes:
        array = np.asarray(tokens)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise self._refused(f"{what}: token ids are not a non-empty row of integers")
        if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
            raise self._refused(f"{what}: a token id is negative or does not fit 32 bits")
        return array.astype("<i4").tobytes()

    def _logprobs(self, name: str, field: str, values: object, length: int | None) -> bytes:
        array = np.asarray(values)
        if array.dtype != np.float32:
            raise self._refused(f"sample {name}: {field} are {array.dtype}, wanted float32")
        if length is not None and array.shape != (length,):
            raise self._refused(f"sample {name}: {array.size} {field} for {length} tokens")
        return array.astype("<f4").tobytes()

    def _finite(self, name: str, field: str, value: float) -> float:
        if not math.isfinite(value):
            raise self._refused(f"sample {name}: {field} is {value}")
        return float(value)

    def _forbidden(self, name: str, state: str, target: str) -> DataBufferError:
        return self._refused(f"sample {name} is {state}, wanted {target}: no such transition")

    def _refused(self, what: str) -> DataBufferError:
        return DataBufferError(f"{self.path}: {what}", "nothing was changed; resume from a checkpoint")


def _rolled_out(db: sqlite3.Connection, step: int, to_step: int) -> bool:
    """Whether ``step`` was rolled out whole by weights no newer than those of ``to_step``."""
    return bool(
        db.execute(
            "SELECT 1 FROM steps JOIN weights ON version = rollout_version "
            "WHERE steps.step = ? AND state != 'planned' AND weights.step <= ?",
            (step, to_step),
        ).fetchone()
    )
