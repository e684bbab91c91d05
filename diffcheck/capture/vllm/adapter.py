"""Drives samples through a live vLLM's own scheduler, and hands back what it answered."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Sequence
from typing import Any

from diffcheck.base.errors import EngineError, InputError
from diffcheck.base.models import resolve_model
from diffcheck.base.progress import Progress
from diffcheck.base.samples import Sample, check_samples
from diffcheck.capture.adapter import CaptureResult, package_versions, with_logprobs
from diffcheck.capture.live import Checkpoint, check_extra, effective_config
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.strict import vllm_path
from diffcheck.capture.vllm.engine import (
    EXTRA,
    LOGPROBS_MODES,
    check_ranks,
    check_version,
    engine_error,
    prepare_environment,
    start,
)
from diffcheck.capture.vllm.schedule import SAMPLE
from diffcheck.live_model.experts import check_experts


class Adapter:
    """A live vLLM engine.

    Raises:
        EngineError: vLLM is missing, of an unknown release, or fails to start.
        InputError: an unknown option, or sizes that cannot be split over the ranks.
    """

    def __init__(self, options: EngineOptions, progress: Progress) -> None:
        self.version = check_version()
        self.options = options
        self.extra = check_extra(options, EXTRA)
        if self.extra["logprobs_mode"] not in (None, *LOGPROBS_MODES):
            raise InputError(
                f"vllm: logprobs_mode {self.extra['logprobs_mode']!r} is unknown",
                f"choose {' or '.join(LOGPROBS_MODES)}",
            )
        folder, config = resolve_model(str(options.model))
        self.config = effective_config(config, options)
        check_experts(self.config, options.engine, options.tensor_parallel)
        check_ranks(self.config, options.tensor_parallel)
        if len(set(self.config.layer_windows)) > 1:
            raise InputError(
                f"vllm: {self.config.architecture} there gives all layers one window, this model only some layers",
                "compare megatron, transformers and reference",
            )
        # Names and bits of weight flips are checked before a worker process could fail on them.
        checkpoint = Checkpoint(folder, _torch_dtype(options.dtype), options.weight_flips)
        for name, _, _ in options.weight_flips:
            checkpoint[name]
        self.max_length = min(options.max_length, self.config.max_position_embeddings)
        prepare_environment(options, graphs=bool(self.extra["graphs"]))
        vllm_path(options)
        progress("vllm: start", 0, 1)
        self._llm = start(options, self.extra, folder, self.config, self.max_length)
        self._runs = 0
        progress("vllm: start", 1, 1)

    @property
    def llm(self) -> Any:
        """The live ``vllm.LLM``, for whoever runs it between captures."""
        return self._llm

    def capture(self, plan: CapturePlan, progress: Progress) -> CaptureResult:
        """Run ``plan`` and write its trace.

        Raises:
            InputError: see `_check_plan`.
            EngineError: vLLM failed, or a boundary could not be attributed.
        """
        mode = self._check_plan(plan)
        seconds = {}
        start = time.monotonic()
        requests: list[str] = []
        try:
            shared = self._draws_in_chunks(plan)
            self._rpc("rlk_begin", json.dumps(self.options.to_json()), plan.dumps(), mode, shared)
            # The prefix cache must not carry over from the last capture: bits do not depend on the run before.
            self._llm.llm_engine.reset_prefix_cache()
            outputs = self._run(plan, requests, progress, shared)
            # After a fault in a hook the engine went on untouched, so its answers are not to be judged.
            self._rpc("rlk_check")
            samples = [_finished(plan, sample, out) for sample, out in zip(plan.samples, outputs, strict=True)]
            seconds["forward"] = round(time.monotonic() - start, 3)
            versions = package_versions("torch") | {"vllm": self.version, "python": platform.python_version()}
            answers = self._rpc("rlk_finish", json.dumps([s.to_json() for s in samples]), versions)
            seconds |= answers[0]["seconds"]
            self._rpc("rlk_end")
        except BaseException:
            # The first fault is the one to report: a dead worker makes these fail too.
            with contextlib.suppress(Exception):
                self._llm.llm_engine.abort_request(requests)
            with contextlib.suppress(Exception):
                self._rpc("rlk_end")
            raise
        return CaptureResult(samples, plan.out, seconds)

    def close(self) -> None:
        """End the worker processes."""
        executor = getattr(self._llm.llm_engine, "model_executor", None)
        if executor is not None:
            executor.shutdown()
        del self._llm

    def _check_plan(self, plan: CapturePlan) -> str:
        """The logprobs mode to run ``plan`` in.

        Raises:
            InputError: a bad sample, contract overrides, a temperature that is not positive or not the samples' own,
                or one that prompt logprobs would ignore; positions beyond the RoPE table.
        """
        if plan.contract_overrides:
            raise InputError("vllm: contracts of a live engine cannot be overridden", "leave --override out")
        prefill = plan.phase == "prefill"
        # vLLM always samples one token after a prompt, so a scored sequence must leave it room.
        room = self.max_length - 1 if prefill else self.max_length
        check_samples(plan.samples, self.config.vocab_size, room, scored=prefill)
        longest = 0
        for i, sample in enumerate(plan.samples):
            length = len(sample.token_ids) + (0 if sample.response_token_ids else plan.generate)
            longest = max(longest, length)
            if length > room:
                raise InputError(f"sample {i}: {length} tokens exceed the limit of {room}", "generate fewer tokens")
            if sample.temperature not in (None, plan.temperature):
                raise InputError(
                    f"sample {i}: temperature {sample.temperature} in a run at {plan.temperature}",
                    "score samples of one temperature at a time",
                )
        if plan.temperature <= 0:
            raise InputError(f"temperature {plan.temperature} is not positive", "logprobs need T > 0")
        if plan.generate < 1 and any(not s.response_token_ids for s in plan.samples):
            raise InputError("nothing to generate for a sample without a response", "give --generate 1 or more")
        if longest + plan.position_offset > self.config.max_position_embeddings or plan.position_offset < 0:
            raise InputError(
                f"position offset {plan.position_offset} leaves the RoPE table of "
                f"{self.config.max_position_embeddings} positions",
                "use a smaller offset or shorter samples",
            )
        shaped = plan.temperature != 1.0 or plan.top_p < 1.0 or plan.top_k > 0
        if prefill and shaped:
            raise InputError(
                "vllm: prompt logprobs ignore temperature, top_p and top_k", "use --phase decode, or T = 1 without them"
            )
        return self.extra["logprobs_mode"] or ("processed_logprobs" if shaped else "raw_logprobs")

    def _draws_in_chunks(self, plan: CapturePlan) -> bool:
        """Whether requests are drawn while prompts may be prefilled in chunks, where vLLM on a CPU fails on a request
        with a seed of its own: it winds the generator back, which a CPU's cannot do.
        """
        if self.options.device != "cpu" or all(s.response_token_ids for s in plan.samples):
            return False
        budget = self._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        lengths = sorted(len(s.token_ids) + (0 if s.response_token_ids else plan.generate) for s in plan.samples)
        at_once = self.extra["max_num_seqs"] or self.options.max_sequences
        return bool(sum(lengths[-at_once:]) > budget)

    def _run(self, plan: CapturePlan, requests: list[str], progress: Progress, shared: bool) -> list[Any]:
        """Drive all samples through the engine's scheduler; its outputs in sample order."""
        engine = self._llm.llm_engine
        self._runs += 1
        names = [f"rlk-{self._runs}-{i}" for i in range(len(plan.samples))]
        for i, (name, sample) in enumerate(zip(names, plan.samples, strict=True)):
            tokens = sample.token_ids if plan.phase == "prefill" else sample.prompt_token_ids
            engine.add_request(name, {"prompt_token_ids": list(tokens)}, _sampling_params(plan, i, sample, shared))
            requests.append(name)
        done: dict[str, Any] = {}
        what = f"vllm: {plan.phase}"
        progress(what, 0, len(names))
        try:
            while engine.has_unfinished_requests():
                finished = {o.request_id: o for o in engine.step() if o.finished}
                if finished:
                    done |= finished
                    progress(what, len(done), len(names))
        except Exception as error:
            raise engine_error("failed in the middle", error, self.options.device) from error
        return [done[name] for name in names]

    def _rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self._llm.collective_rpc(method, args=args)
        for answer in answers:
            if "error" in answer:
                kind = InputError if answer["error"]["input"] else EngineError
                error = kind(answer["error"]["cause"], answer["error"]["remedy"])
                error.add_note(answer["error"]["trace"])
                raise error
        return answers


def _torch_dtype(name: str) -> Any:
    import torch

    if name not in ("bfloat16", "float16", "float32"):
        raise InputError(f"vllm: dtype {name!r} is unknown", "choose bfloat16, float16 or float32")
    return getattr(torch, name)


def _sampling_params(plan: CapturePlan, number: int, sample: Sample, shared: bool) -> Any:
    """Parameters of one request.

    Args:
        shared: whether all draws come from the worker's own generator, seeded when the capture begins.
    """
    from vllm import SamplingParams

    common: dict[str, Any] = {"detokenize": False, "ignore_eos": True, "extra_args": {SAMPLE: number}}
    if plan.phase == "prefill":
        return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, **common)
    drawn: dict[str, Any] = {"max_tokens": len(sample.response_token_ids)}
    if not sample.response_token_ids:
        # A seed of its own makes a request's draws independent of what else is in flight.
        drawn = {"max_tokens": plan.generate, "seed": None if shared else plan.seed + number}
    shape = {"temperature": plan.temperature, "top_p": plan.top_p, "top_k": plan.top_k}
    return SamplingParams(logprobs=0, **shape, **drawn, **common)


def _finished(plan: CapturePlan, sample: Sample, output: Any) -> Sample:
    """The sample with its response and the logprobs exactly as vLLM returned them (Python floats of float32 values).

    Raises:
        EngineError: vLLM decoded other tokens than the recorded ones, or returned no logprob for one.
    """
    prompt = None
    if plan.phase == "prefill":
        response = sample.response_token_ids
        first = len(sample.prompt_token_ids)
        # As they were answered: a buffer that holds another request's would pass by every hook.
        pairs = zip(output.prompt_logprobs[1:first], sample.prompt_token_ids[1:], strict=True)
        prompt = tuple(float(entry[token].logprob) for entry, token in pairs)
        entries: Sequence[Any] = output.prompt_logprobs[first:]
    else:
        (completion,) = output.outputs
        response = tuple(int(t) for t in completion.token_ids)
        entries = completion.logprobs
        if sample.response_token_ids and response != sample.response_token_ids:
            raise EngineError("vLLM did not decode the recorded tokens", "report this configuration")
    if len(entries) != len(response):
        raise EngineError(f"vLLM returned {len(entries)} logprobs for {len(response)} tokens")
    logprobs = tuple(float(entry[token].logprob) for entry, token in zip(entries, response, strict=True))
    return with_logprobs(sample, response, logprobs, prompt)
