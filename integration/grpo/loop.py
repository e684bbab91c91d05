"""The driver: one step is rollout, reward, recomputed logprobs, comparison, update, sync, checkpoint.

The driver holds no state that is not in the run's folder. Whatever dies, the run goes back to the newest checkpoint and
does the steps after it again; every draw is a function of the seed and the step, so that they come out as before.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.errors import EngineDiedError, EngineError, InputError
from diffcheck.base.files import write_text
from diffcheck.base.models import resolve_model
from integration.grpo.buffer import Buffer
from integration.grpo.buffer.records import Buffered, Generated, Scored
from integration.grpo.checkpoint import Checkpoints
from integration.grpo.config import CONFIG, GrpoConfig, check_continues, stored_config
from integration.grpo.evidence import Evidence
from integration.grpo.machine import check_machine
from integration.grpo.mismatch.metrics import mismatch_of
from integration.grpo.preflight import PROMPTS, DivergedError, require_equal, run_preflight
from integration.grpo.steplog import append_step, keep_steps, step_record
from integration.grpo.tasks import open_task
from integration.grpo.tasks.tokenizer import tokens_without_text
from integration.grpo.workers.actors import Actor
from integration.grpo.workers.delivery import Delivery
from integration.grpo.workers.engines import ROLES, OpenEngine, Role
from integration.grpo.workers.objective import advantages

Announce = Callable[[str], None]
PHASES = ("rollout", "reward", "recompute", "update", "sync", "preflight", "checkpoint")


class Run:
    """One run in its folder.

    Args:
        resume: the folder holds a run that goes on; else it must hold none that finished a step.
        stop_after: is asked with each finished step and its seconds whether to end here; the run can be resumed.
        announce: is told what happens, a line each.
        finished: is shown each step's record.

    Raises:
        InputError: the folder cannot be used, holds another run, or the task does not fit the model.
    """

    def __init__(
        self,
        config: GrpoConfig,
        out: Path,
        open_engine: OpenEngine,
        *,
        resume: bool = False,
        command: str = "",
        stop_after: Callable[[int, float], bool] = lambda _step, _seconds: False,
        announce: Announce = lambda _: None,
        finished: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.config, self.out = config, out
        self._open_engine, self._announce, self._finished = open_engine, announce, finished
        self._stop_after, self._stopping = stop_after, False
        self._folder, self._model = resolve_model(config.model, announce)
        if self._model.num_experts:
            raise InputError(
                f"{config.model}: a mixture of experts is not trained here: its gradients have no strict contract yet",
                "take a dense model; rlk-diff localize compares mixtures of experts, forward only (docs/moe.md)",
            )
        self._task = open_task(config.task, self._folder, self._model, config.seed, config.task_options)
        self._hidden = tokens_without_text(self._folder, self._model.vocab_size, self._task.stop_token_ids)
        if self._hidden:
            announce(f"{len(self._hidden)} token ids of the model are not the tokenizer's: both engines leave them out")
        self._length = self._sequence_length()
        check_machine(config, self._model, self._length)
        is_begun = _claim(out, config, resume=resume)
        self._steps_path = out / "steps.jsonl"
        self._checkpoints = Checkpoints(out / "checkpoints", config.keep_checkpoints)
        self._buffer = Buffer.open(out / "samples.sqlite")
        if not is_begun:
            # What a run left that ended before its first step: another configuration may begin here.
            self._buffer.clear()
            (out / "evidence.json").unlink(missing_ok=True)
        self._evidence = Evidence(out / "evidence.json", config, command)
        # Only now: until here another run may have held the folder.
        write_text(out / CONFIG, json.dumps(config.to_json(), indent=1) + "\n")
        self._actors: dict[Role, Actor] = {}
        self._delivery = Delivery(config, out / "weights", announce)
        #: Version that the last preflight probed.
        self._probed: int | None = None
        self._seconds: dict[str, float] = {}

    def run(self) -> list[dict[str, Any]]:
        """Run all steps; a dead engine is replaced, as often as the configuration allows.

        Returns:
            The record of every step.

        Raises:
            DivergedError: two strict engines disagree.
            RlkError: anything else that a user can mend. The folder can be resumed.
        """
        restarts = 0
        try:
            while True:
                try:
                    return self._run()
                except EngineDiedError as error:
                    restarts += 1
                    if restarts > self.config.max_restarts:
                        raise EngineError(
                            f"{error.cause}, and {restarts - 1} restarts are used up",
                            f"see {self.out / 'logs'}, then go on with --resume",
                        ) from error
                    self._announce(f"{error.cause}: restart {restarts} of {self.config.max_restarts}")
                    self._evidence.restarted(error.cause)
                    self._bury()
        except BaseException:
            self._stop(hurry=True)
            raise
        finally:
            self._stop()
            self._buffer.close()

    @property
    def _rollout(self) -> Actor:
        return self._actors["rollout"]

    @property
    def _trainer(self) -> Actor:
        return self._actors["trainer"]

    def _run(self) -> list[dict[str, Any]]:
        self._start()
        first = self._restore()
        records = keep_steps(self._steps_path, first - 1)
        if first > self.config.steps:
            return records
        self._evidence.began(first)
        for step in range(first, self.config.steps + 1):
            records.append(self._step(step))
            if self._stopping:
                self._announce(f"stopped after step {step} of {self.config.steps}: go on with --resume")
                break
        self._buffer.check()
        self._evidence.write(self._rollout, self._trainer, len(records))
        return records

    def _start(self) -> None:
        options = {
            "config": self.config.to_json(),
            "folder": str(self._folder),
            "max_length": self._length,
            "stop": list(self._task.stop_token_ids),
            "hidden": list(self._hidden),
        }
        logs = self.out / "logs"
        logs.mkdir(exist_ok=True)
        missing = [role for role in ROLES if role not in self._actors]
        self._announce(f"starting {' and '.join(missing)}")
        for role in missing:
            self._actors[role] = self._open_engine(role, self.config, options, logs)
        for role in missing:
            self._actors[role].wait_ready()
        self._delivery.attach(self._rollout, self._trainer)
        self._probed = None

    def _bury(self) -> None:
        """End the actors that died, and those that cannot be set back."""
        can_go_back = self._checkpoints.newest(lambda _: None) is not None
        for role, actor in list(self._actors.items()):
            if not actor.is_idle or (role == "trainer" and not can_go_back):
                self._end(role, hurry=True)

    def _stop(self, *, hurry: bool = False) -> None:
        for role in list(self._actors):
            self._end(role, hurry=hurry)

    def _end(self, role: Role, *, hurry: bool) -> None:
        with suppress(Exception):
            self._actors.pop(role).close(hurry=hurry)

    def _restore(self) -> int:
        """Set everything back to the newest whole checkpoint.

        Returns:
            The step to go on with.
        """
        found = self._checkpoints.newest(self._announce)
        done = 0 if found is None else found.step
        self._checkpoints.forget_after(done)
        self._buffer.rewind(done)
        if found is not None:
            self._trainer.call("load", folder=str(found.folder), version=done)
            self._announce(f"going on after step {done}")
        self._delivery.export(done)
        digest = self._delivery.digest(done)
        known = {weights.version: weights.digest for weights in self._buffer.weights()}
        if done not in known:
            self._buffer.add_weights(done, done, digest)
        elif known[done] != digest:
            raise InputError(
                f"{self.out}: the weights of step {done} are not those that the run had there",
                "restore the model's folder or the checkpoint from a copy, or start anew in another folder",
            )
        return done + 1

    def _step(self, step: int) -> dict[str, Any]:
        config, self._seconds, start = self.config, dict.fromkeys(PHASES, 0.0), time.perf_counter()
        self._launch(step)
        samples = self._collect(step)
        if (step - 1) % config.checkpoint_stride == 0:
            # Here, because now no rollout is in flight.
            self._evidence.write(self._rollout, self._trainer, step)
        if config.staleness and step < config.steps:
            self._launch(step + 1)
        with self._timed("reward"):
            rewards = {s.id: float(self._task.reward(s.prompt_token_ids.tolist(), _response(s))) for s in samples}
            self._buffer.rewarded(rewards)
        reference = self._score(step, samples, list(rewards.values()))
        scored = self._buffer.samples(step)
        found = mismatch_of(scored, config.rollout_version(step))
        learned = self._learn(step, scored, reference)
        with self._timed("sync"):
            self._delivery.export(step)
            if not config.staleness:
                self._delivery.sync(step)
            digest = self._delivery.digest(step)
            self._buffer.synced(step, step, digest)
        self._stopping = step < config.steps and self._stop_after(step, time.perf_counter() - start)
        is_checkpoint = step % config.checkpoint_stride == 0 or step == config.steps or self._stopping
        with self._timed("checkpoint"):
            if is_checkpoint:
                self._trainer.call("save", folder=str(self._checkpoints.stage(step)))
        consumed = self._buffer.samples(step)
        record = step_record(step, config.rollout_version(step), found, consumed, learned, digest)
        seconds = {**self._seconds, "total": time.perf_counter() - start}
        record["seconds"] = {name: round(value, 4) for name, value in seconds.items()}
        # The line before the checkpoint: one of a step without its line could not be gone back to.
        append_step(self._steps_path, record)
        if is_checkpoint:
            self._checkpoints.commit(step, {"version": step, "digest": digest})
        self._finished(record)
        if config.mode == "strict" and found.mismatch_count:
            raise DivergedError(
                f"step {step}: {found.mismatch_count} of {found.compared} logprobs differ, the most in "
                f"{found.max_abs_sample} at position {found.max_abs_position}",
                "rlk-diff localize with the same profile names the boundary; the run's folder keeps everything",
            )
        return record

    def _score(self, step: int, samples: list[Buffered], rewards: list[float]) -> list[list[float]] | None:
        """Recompute logprobs with the weights that rolled out, and store them with the advantages.

        Returns:
            Logprobs of the frozen policy, where the objective has a KL.
        """
        version = self.config.rollout_version(step)
        with self._timed("recompute"):
            answer = self._trainer.call("score", sequences=[_sequence(s) for s in samples], version=version)
            check_scores(samples, answer["logprobs"], "trainer")
            check_scores(samples, answer["reference"] or [[]] * len(samples), "frozen policy")
            gains = advantages(
                rewards,
                [s.prompt_index for s in samples],
                ddof=self.config.ddof,
                scale=self.config.scale_rewards,
            )
            records = [
                Scored(s.id, np.asarray(logprobs, np.float32), float(gain))
                for s, logprobs, gain in zip(samples, answer["logprobs"], gains, strict=True)
            ]
            self._buffer.scored(records, version)
        reference: list[list[float]] | None = answer["reference"]
        return reference

    def _learn(self, step: int, samples: list[Buffered], reference: list[list[float]] | None) -> dict[str, Any]:
        """One update from scored samples, which it consumes; what the trainer says of it."""
        with self._timed("update"):
            learned = self._trainer.call(
                "update",
                sequences=[
                    {**_sequence(s), "mask": self._task.loss_mask(s.prompt_token_ids.tolist(), _response(s))}
                    for s in samples
                ],
                advantages=[s.advantage for s in samples],
                old=[[] if s.train_logprobs is None else s.train_logprobs.tolist() for s in samples],
                reference=reference,
            )
            self._buffer.consume(step)
        return learned

    def _launch(self, step: int) -> None:
        """Begin the rollouts of ``step``, unless they are begun already."""
        if self._buffer.samples(step):
            return
        config = self.config
        version = config.rollout_version(step)
        with self._timed("sync"):
            self._delivery.sync(version)
        if config.preflight_stride and version % config.preflight_stride == 0 and version != self._probed:
            with self._timed("preflight"):
                self._preflight(step, version)
        with self._timed("rollout"):
            prompts = self._task.prompts(step, config.prompts_per_step)
            planned = self._buffer.plan(step, prompts, config.group_size, rollout_version=version, seed=config.seed)
            requests = [{"id": s.id, "prompt": s.prompt_token_ids.tolist(), "seed": s.seed} for s in planned]
            self._rollout.start("generate", requests=requests, version=version, digests=self._delivery.digests(version))

    def _collect(self, step: int) -> list[Buffered]:
        """The samples of ``step`` with their responses."""
        with self._timed("rollout"):
            records = self._rollout.result()["records"]
            self._buffer.generated(checked_answer(record) for record in records)
            return self._buffer.samples(step)

    def _preflight(self, step: int, version: int) -> None:
        found = run_preflight(
            self._rollout,
            self._trainer,
            self.config,
            self._task.prompts(step, PROMPTS),
            step=step,
            version=version,
            folder=self.out / "preflight",
        )
        self._evidence.preflight(found)
        self._probed = version
        self._announce(
            f"preflight before step {step}: {found.verdict}, {found.observed} of {found.expected} boundaries seen"
            + (f", first at {found.boundary}" if found.boundary else "")
        )
        if self.config.mode == "strict":
            require_equal(found)

    def _sequence_length(self) -> int:
        longest = self._task.longest_prompt + self.config.max_tokens
        limit = self._model.max_position_embeddings
        if longest + 1 > limit:
            raise InputError(
                f"prompts of {self._task.longest_prompt} and responses of {self.config.max_tokens} tokens exceed the "
                f"model's {limit} positions",
                "use a smaller max_tokens, or shorter prompts",
            )
        # One more, so that vLLM may draw after the last token.
        return min(limit, -(-(longest + 1) // 64) * 64)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start


def checked_answer(answer: dict[str, Any]) -> Generated:
    """A rollout's answer, if it can be trained on.

    Raises:
        EngineError: no token, another number of logprobs than tokens, or one that is no finite number.
    """
    tokens, logprobs = answer["tokens"], answer["logprobs"]
    remedy = "nothing was trained on it: resume the run, or look for the fault with rlk-diff localize"
    if not tokens or len(logprobs) != len(tokens):
        raise EngineError(f"sample {answer['id']}: {len(logprobs)} logprobs for {len(tokens)} tokens", remedy)
    for position, value in enumerate(logprobs):
        if not math.isfinite(value):
            raise EngineError(f"sample {answer['id']}: the logprob of response token {position} is {value}", remedy)
    values = np.asarray(logprobs, np.float32)
    return Generated(answer["id"], tokens, values, answer["finish_reason"], answer["version"])


def check_scores(samples: Sequence[Buffered], logprobs: Sequence[Sequence[float]], whose: str) -> None:
    """Check that recomputed logprobs, a list a sample, can be learned from.

    Raises:
        EngineError: one is NaN or infinite.
    """
    for sample, values in zip(samples, logprobs, strict=True):
        for position, value in enumerate(values):
            if not math.isfinite(value):
                raise EngineError(
                    f"sample {sample.id}: the {whose}'s logprob of response token {position} is {value}",
                    "nothing was learned from it: look for the fault with rlk-diff localize, then resume the run",
                )


def _response(sample: Buffered) -> list[int]:
    assert sample.response_token_ids is not None
    tokens: list[int] = sample.response_token_ids.tolist()
    return tokens


def _sequence(sample: Buffered) -> dict[str, Any]:
    return {"id": sample.id, "prompt": sample.prompt_token_ids.tolist(), "response": _response(sample)}


#: What a run that was killed before it had its configuration leaves: nobody's work.
_OF_A_START = ("samples.sqlite", "samples.sqlite-wal", "samples.sqlite-shm", "evidence.json", "checkpoints")


def _claim(out: Path, config: GrpoConfig, *, resume: bool) -> bool:
    """Make the folder, or check that what is in it is this run.

    Returns:
        Whether a step of it was ever finished.
    """
    found = stored_config(out)
    if found is None and resume:
        raise InputError(f"{out}: holds no run that could go on", "give the folder of a run, or leave --resume out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: {error.strerror}", "choose another --out") from None
    steps = out / "steps.jsonl"
    is_begun = (steps.exists() and steps.stat().st_size > 0) or any((out / "checkpoints").glob("step-*"))
    if found is not None and is_begun:
        if not resume:
            raise InputError(f"{out}: holds a run already", "go on with --resume, or choose another --out")
        check_continues(found, config)
    elif found is None and any(path.name not in _OF_A_START for path in out.iterdir()):
        raise InputError(f"{out}: is not empty, and holds no run", "choose another --out")
    return is_begun
