"""The side of the adapter that lives in vLLM's workers, the same for one rank and for many.

vLLM mixes `WorkerExtension` into its worker class and calls its methods on every rank. Faults come back as data: an
exception would end a worker process, and the engine with it.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from diffcheck.base.boundaries import graph
from diffcheck.base.errors import EngineError, InputError, RlkError
from diffcheck.base.record import KvMapping, ObjectRecord
from diffcheck.base.samples import Sample
from diffcheck.capture.adapter import write_trace_of
from diffcheck.capture.live import Taps, object_record
from diffcheck.capture.patches import apply_patches
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.recorder import Recorder
from diffcheck.capture.strict import vllm_path
from diffcheck.capture.vllm.evidence import engine_evidence
from diffcheck.capture.vllm.head_taps import tap_head
from diffcheck.capture.vllm.live_modules import attention_mask, module_facts, rope_tables
from diffcheck.capture.vllm.loader import gather_ranks, live_digests
from diffcheck.capture.vllm.schedule import Schedule
from diffcheck.capture.vllm.taps import Live, tap_forward, tap_model
from diffcheck.rows import expected_rows
from reference.models.config import ModelConfig


class Capture:
    """One plan in one worker, from the first hook to the trace."""

    def __init__(
        self, worker: Any, options: EngineOptions, plan: CapturePlan, logprobs_mode: str, shared: bool = False
    ) -> None:
        runner = worker.model_runner
        self._worker, self._runner, self._options = worker, runner, options
        self._logprobs_mode = logprobs_mode
        self._shared = shared
        self._model = runner.get_model()
        config = ModelConfig.from_dict(runner.model_config.hf_config.to_dict(), live=True)
        ranks = options.tensor_parallel
        recorder = Recorder(plan, graph(config, ranks), rank=worker.rank, gather=gather_ranks if ranks > 1 else None)
        self._live = Live(plan, config, recorder, Schedule(runner), ranks)
        self._strict = vllm_path(options)
        if self._strict is not None:
            self._strict.begin(runner, self._model)
        with ExitStack() as stack:
            taps = stack.enter_context(Taps())
            taps.attribute(runner, "execute_model", self._follow)
            inside = bool(plan.observe or plan.interventions or plan.position_offset)
            tap_forward(taps, self._live, runner, eager=inside)
            if inside:
                tap_model(taps, self._live, self._model)
            tap_head(taps, self._live, self._model, runner.sampler, logprobs_mode)
            # From here on the hooks stay until `close`.
            self._hooks = stack.pop_all()

    def _follow(self, original: Any) -> Any:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._live.schedule.output = scheduler_output
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    def check(self) -> dict[str, Any]:
        """Raises:
        RlkError: what went wrong in a hook, if anything did.
        """
        if self._live.failure is not None:
            raise self._live.failure
        return {}

    def finish(self, samples: list[Sample], versions: dict[str, str]) -> dict[str, Any]:
        """Write the trace (rank 0) and say what was seen.

        Raises:
            EngineError: the logprobs that the engine returned are not the observed ones.
        """
        live = self._live
        strict = {}
        if self._strict is not None:
            strict = {"strict": self._strict.evidence(live.config.num_hidden_layers, live.schedule.facts.steps)}
        self._weights = self._live_digests()
        if self._worker.rank:
            return {}
        start = time.monotonic()
        self._check_logprobs(samples)
        evidence = {
            **engine_evidence(self._runner, self._model),
            "logprobs_mode": self._logprobs_mode,
            "scheduler": live.schedule.facts.to_json(),
            **strict,
        }
        write_trace_of(
            live.plan,
            self._options,
            live.recorder,
            samples,
            self._record(samples),
            versions=versions,
            evidence=evidence,
        )
        return {"seconds": {"write": round(time.monotonic() - start, 3)}}

    def close(self) -> None:
        """Take every hook off."""
        self._hooks.close()

    def _check_logprobs(self, samples: list[Sample]) -> None:
        """The floats in the engine's answer must be those seen on their way there."""
        import numpy as np

        bits, _ = self._live.recorder.values("logprobs", expected_rows(samples)["response"])
        answered = np.array([x for s in samples for x in s.rollout_logprobs or ()], np.float32)
        if not np.array_equal(bits.view(np.float32)[:, 0], answered, equal_nan=True):
            raise EngineError("the logprobs that vLLM returned are not those that its sampler gathered")

    def _live_digests(self) -> dict[str, str]:
        """HF name -> digest: of the weights that a strict engine reads now; of what a native one, whose packed weights
        nobody can read, was last given.
        """
        if self._strict is None:
            return live_digests(self._model, self._live.config)
        digests: dict[str, str] = self._strict.weight_digests(self._worker, self._live.config)
        return digests

    def _record(self, samples: list[Sample]) -> ObjectRecord:
        live, plan = self._live, self._live.plan
        strict = None
        if self._strict is not None:
            strict = getattr(self._strict.live_operators(self._model), "live_rope", lambda: None)()
        record = object_record(
            live.config,
            plan,
            samples,
            weights=self._weights,
            tokens=live.tokens,
            positions=live.positions,
            rope_tables=rope_tables(self._model, max((s.forward_length for s in samples), default=0), strict),
            layers=module_facts(self._model, live.config, live.ranks),
            padded_vocab=int(self._model.model.embed_tokens.num_embeddings_padded),
            tensor_parallel=live.ranks,
            targets=live.targets,
            attention_mask=attention_mask(self._model),
        )
        record.kv = KvMapping("paged", live.schedule.block_size, live.slots.lists(samples))
        record.top_p, record.top_k = plan.top_p, plan.top_k
        if any(not s.response_token_ids for s in plan.samples):
            own = "vLLM generator per request, seeded seed + sample"
            record.random_state = {"seed": plan.seed, "stream": "the worker's generator" if self._shared else own}
        return record


def _answer(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``function`` returns, or {"error": ...} with what the adapter needs to raise it again."""
    try:
        return function()
    except Exception as error:
        known = isinstance(error, RlkError)
        return {
            "error": {
                "input": isinstance(error, InputError),
                "cause": error.cause if isinstance(error, RlkError) else f"{type(error).__name__}: {error}",
                "remedy": error.remedy if isinstance(error, RlkError) else "",
                "trace": "" if known else traceback.format_exc(),
            }
        }


class WorkerExtension:
    """Methods that vLLM's workers gain; each is called on all ranks."""

    _rlk_capture: Capture | None
    #: Whether the live model was patched: an engine lives through many captures.
    _rlk_patched = False

    def rlk_begin(self, options: str, plan: str, logprobs_mode: str, shared: bool = False) -> dict[str, Any]:
        """Put the hooks of a plan (JSON texts) on; seed the worker where requests have no seed of their own."""

        def begin() -> dict[str, Any]:
            if shared:
                import torch

                torch.manual_seed(json.loads(plan)["seed"])
            opened = EngineOptions.from_json(json.loads(options))
            if not self._rlk_patched:
                apply_patches(opened.patches, self.model_runner.get_model())  # type: ignore[attr-defined]
                self._rlk_patched = True
            self._rlk_capture = Capture(
                self,
                opened,
                CapturePlan.from_json(json.loads(plan)),
                logprobs_mode,
                shared,
            )
            return {}

        return _answer(begin)

    def rlk_check(self) -> dict[str, Any]:
        """Whether every hook did its work."""

        def check() -> dict[str, Any]:
            assert self._rlk_capture is not None
            return self._rlk_capture.check()

        return _answer(check)

    def rlk_finish(self, samples: str, versions: dict[str, str]) -> dict[str, Any]:
        """Write the trace of the finished ``samples`` (a JSON text)."""

        def finish() -> dict[str, Any]:
            assert self._rlk_capture is not None
            return self._rlk_capture.finish([Sample.from_json(s) for s in json.loads(samples)], versions)

        return _answer(finish)

    def rlk_end(self) -> dict[str, Any]:
        """Take the hooks off, whatever happened."""

        def end() -> dict[str, Any]:
            capture = getattr(self, "_rlk_capture", None)
            self._rlk_capture = None
            if capture is not None:
                capture.close()
            return {}

        return _answer(end)
