"""Hugging Face transformers: scoring whole sequences as TRL-like trainers do, or decoding with its own KV cache."""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffcheck.base.boundaries import graph
from diffcheck.base.errors import EngineError, InputError
from diffcheck.base.models import resolve_model
from diffcheck.base.progress import Progress
from diffcheck.base.record import weight_digest
from diffcheck.base.samples import Sample, check_samples
from diffcheck.capture.adapter import CaptureResult, package_versions, write_trace_of
from diffcheck.capture.live import (
    Checkpoint,
    check_extra,
    effective_config,
    finished_samples,
    object_record,
    observe,
    torch_dtype,
)
from diffcheck.capture.patches import apply_patches
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.recorder import Recorder
from diffcheck.capture.switches import Switch
from diffcheck.capture.transformers.experts import hf_parameters
from diffcheck.capture.transformers.taps import TransformersTaps
from diffcheck.live_model.facts import Facts, fold
from diffcheck.rows import Rows
from reference.models.weights import weight_shapes

Tensor = Any
#: Oldest release with the attention interface and argument names used here.
OLDEST = (4, 56)
#: Engine-specific switches.
EXTRA = {
    "attn_implementation": Switch(str, "eager", "attention of transformers", ("eager", "sdpa")),
    "logprob": Switch(
        str,
        "log_softmax",
        "torch.log_softmax, or the chosen logit minus torch.logsumexp",
        ("log_softmax", "logsumexp"),
    ),
    "threads": Switch(int, 0, "CPU threads; 0: torch's own choice", least=0),
}
_NO_LOGSUMEXP = "torch.log_softmax computes it inside one kernel"


class Adapter:
    """A live ``*ForCausalLM`` in this process.

    Raises:
        EngineError: transformers is missing or too old.
        InputError: an option it does not know, or tensor parallelism.
    """

    def __init__(self, options: EngineOptions, progress: Progress) -> None:
        self.version = _check_version()
        if options.profile is not None:
            raise InputError(f"transformers: profile {options.profile!r} is not available", "native only: omit it")
        if options.tensor_parallel != 1:
            raise InputError("transformers: tensor parallelism is not supported", "use --tp 1")
        self.options = options
        extra = check_extra(options, EXTRA)
        self.implementation = extra["attn_implementation"]
        self.logprob = extra["logprob"]
        for name, choices in ((n, s.choices) for n, s in EXTRA.items() if s.choices):
            if extra[name] not in choices:
                raise InputError(
                    f"transformers: {name} {extra[name]!r} is not supported", f"choose one of {', '.join(choices)}"
                )
        folder, config = resolve_model(str(options.model))
        if config.partial_rotary_factor != 1.0:
            raise InputError(
                f"transformers: {config.architecture} there ignores partial_rotary_factor "
                f"{config.partial_rotary_factor}: it rotates whole heads",
                "compare vllm, megatron and reference",
            )
        self.config = effective_config(config, options)
        progress("transformers: load", 0, 1)
        if extra["threads"]:
            import torch

            torch.set_num_threads(int(extra["threads"]))
        self.model = self._load(folder)
        apply_patches(options.patches, self.model)

    def capture(self, plan: CapturePlan, progress: Progress) -> CaptureResult:
        """Run ``plan``: phase "prefill" scores in one forward a sample, "decode" feeds one token a step from the KV
        cache, given ones or sampled ones.

        Raises:
            InputError: a sample without a response in phase "prefill", or contract overrides.
        """
        import torch

        if plan.contract_overrides:
            raise InputError("transformers: a native engine follows no contract to override", "leave --override out")
        decode = plan.phase == "decode"
        check_samples(plan.samples, self.config.vocab_size, self.options.max_length, scored=not decode)
        recorder = Recorder(plan, graph(self.config))
        if self.logprob == "log_softmax":
            recorder.cannot_observe("logsumexp", _NO_LOGSUMEXP)
        samples = list(plan.samples)
        sampled = any(not s.response_token_ids for s in samples)
        seconds = {}
        start = time.perf_counter()
        with TransformersTaps(self.model, self.config, recorder, self.implementation) as taps, torch.no_grad():
            for i, sample in enumerate(samples):
                progress(f"transformers: {plan.phase}", i, len(samples))
                if decode:
                    samples[i] = self._decode(i, sample, plan, recorder, taps)
                else:
                    self._score(i, sample, plan, recorder, taps)
        progress(f"transformers: {plan.phase}", len(samples), len(samples))
        seconds["forward"] = time.perf_counter() - start
        start = time.perf_counter()
        record = object_record(
            self.config,
            plan,
            samples,
            weights={name: weight_digest(weight) for name, weight in hf_parameters(self.model)},
            tokens=taps.tokens,
            positions=taps.positions,
            rope_tables=taps.rope_tables(self.model.model.rotary_emb),
            layers=self._facts(),
            attention_mask=taps.attention_mask,
            padded_vocab=self.model.get_output_embeddings().weight.shape[0],
        )
        if sampled:
            record.top_p, record.top_k, record.random_state = plan.top_p, plan.top_k, {"seed": plan.seed}
        seconds["record"] = time.perf_counter() - start
        start = time.perf_counter()
        done = finished_samples(recorder, samples)
        versions = package_versions("torch") | {"transformers": self.version, "python": platform.python_version()}
        write_trace_of(plan, self.options, recorder, done, record, versions=versions, evidence=self._evidence(decode))
        seconds["write"] = time.perf_counter() - start
        return CaptureResult(done, plan.out, seconds)

    def close(self) -> None:
        """Give the model's memory back."""
        self.__dict__.pop("model", None)

    def _load(self, folder: Path) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        for name, value in self.options.model_overrides.items():
            if name == "rope_theta" and getattr(config, "rope_parameters", None):
                config.rope_parameters["rope_theta"] = float(value)
            else:
                setattr(config, name, float(value))
        dtype = torch_dtype(self.options)
        checkpoint = Checkpoint(folder, dtype, self.options.weight_flips)
        for name, _ in weight_shapes(self.config):
            if name not in checkpoint:
                # transformers would go on with random values.
                raise InputError(f"{folder}: weight {name} is missing", "save the whole model with safetensors")
        if self.config.num_experts:
            if not hasattr(config, "_experts_implementation"):
                raise InputError(
                    f"transformers: release {self.version} has no choice of how experts are computed",
                    "mixtures of experts need transformers 5",
                )
            # One expert after the other: a grouped product would hide what is inside.
            config._experts_implementation = "eager"
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=self.implementation, local_files_only=True
        )
        with torch.no_grad():
            for name, _, _ in self.options.weight_flips:
                dict(hf_parameters(model))[name].copy_(checkpoint[name])
        return model.to(self.options.device).eval()

    def _score(self, i: int, sample: Sample, plan: CapturePlan, recorder: Recorder, taps: TransformersTaps) -> None:
        rows = Rows.of(i, range(sample.forward_length))
        taps.begin(rows, rows)
        logits = self.model(
            input_ids=self._ids(sample.token_ids[:-1]), position_ids=self._positions(rows, plan), use_cache=False
        ).logits
        processed = _process(logits, plan, recorder, rows)
        self._logprobs(processed, self._ids(sample.token_ids[1:]), recorder, rows)

    def _decode(self, i: int, sample: Sample, plan: CapturePlan, recorder: Recorder, taps: TransformersTaps) -> Sample:
        """The prompt in one forward, then one token a step; returns the sample with its response."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        draw = torch.Generator(device=self.options.device).manual_seed(plan.seed * 1_000_003 + i)
        given, response = sample.response_token_ids, list[int]()
        fed, first = list(sample.prompt_token_ids), 0
        for step in range(len(given) or plan.generate):
            rows = Rows.of(i, range(first, first + len(fed)))
            last = rows.take(slice(-1, None))
            taps.begin(rows, last)
            logits = self.model(
                input_ids=self._ids(fed),
                position_ids=self._positions(rows, plan),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            processed = _process(logits, plan, recorder, last)
            token = given[step] if given else _sample(processed[0], plan, draw)
            self._logprobs(processed, self._ids([token]), recorder, last)
            response.append(token)
            first, fed = first + len(fed), [token]
        return replace(sample, response_token_ids=tuple(response))

    def _logprobs(self, processed: Tensor, targets: Tensor, recorder: Recorder, rows: Rows) -> None:
        """Logprobs of ``targets`` [1, rows] under ``processed`` [1, rows, vocabulary]."""
        import torch

        if self.logprob == "log_softmax":
            chosen = torch.log_softmax(processed, dim=-1).gather(-1, targets[..., None])
        else:
            total = torch.logsumexp(processed, dim=-1, keepdim=True)
            chosen = processed.gather(-1, targets[..., None]) - observe(recorder, "logsumexp", rows, total)
        recorder.observe("logprobs", rows, chosen[0])

    def _ids(self, ids: list[int] | tuple[int, ...]) -> Tensor:
        import torch

        return torch.tensor([list(ids)], device=self.options.device)

    def _positions(self, rows: Rows, plan: CapturePlan) -> Tensor:
        return self._ids((rows.position + plan.position_offset).tolist())

    def _facts(self) -> dict[str, dict[str, Any]]:
        """What the live modules of every layer compute with."""
        facts = Facts()
        for n, layer in enumerate(self.model.model.layers):
            name, attention = f"layers.{n}", layer.self_attn
            facts.norm(f"{name}.input_layernorm", layer.input_layernorm)
            facts.norm(f"{name}.post_attention_layernorm", layer.post_attention_layernorm)
            if self.config.qk_norm:
                facts.norm(f"{name}.self_attn.q_norm", attention.q_norm)
                facts.norm(f"{name}.self_attn.k_norm", attention.k_norm)
            for x in "qkvo":
                facts.linear(f"{name}.self_attn.{x}_proj", getattr(attention, f"{x}_proj"))
            if self.config.is_sparse(n):
                facts.add("experts_per_token", f"{name}.mlp", int(layer.mlp.gate.top_k))
            for x in () if self.config.is_sparse(n) else ("gate", "up", "down"):
                facts.linear(f"{name}.mlp.{x}_proj", getattr(layer.mlp, f"{x}_proj"))
            own, size = f"{name}.self_attn.attention", int(attention.head_dim)
            facts.add("scale", own, float(attention.scaling))
            facts.add("heads", own, [attention.q_proj.out_features // size, attention.k_proj.out_features // size])
        facts.norm("norm", self.model.model.norm)
        return facts.found

    def _evidence(self, decode: bool) -> dict[str, Any]:
        import torch

        layers = self.model.model.layers
        return {
            "forward": "incremental decode from DynamicCache" if decode else "whole sequences, one forward a sample",
            "model_class": type(self.model).__name__,
            "attention": f"{fold({f'layer {n}': type(x.self_attn).__name__ for n, x in enumerate(layers)})}, "
            f"{self.implementation}",
            "norm": fold({f"layer {n}": type(x.input_layernorm).__name__ for n, x in enumerate(layers)}),
            "logprob": f"torch.{self.logprob} of float32(logits) / temperature",
            "parameter_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in self.model.parameters()}),
            "device": self.options.device,
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "world_size": 1,
        }


def _process(logits: Tensor, plan: CapturePlan, recorder: Recorder, rows: Rows) -> Tensor:
    return observe(recorder, "processed_logits", rows, logits.float() / plan.temperature)


def _sample(processed: Tensor, plan: CapturePlan, draw: Any) -> int:
    """One draw from processed logits [1, vocabulary], truncated as ``generate`` does."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    if plan.top_k:
        processed = TopKLogitsWarper(plan.top_k)(None, processed)
    if plan.top_p < 1:
        processed = TopPLogitsWarper(plan.top_p)(None, processed)
    return int(processed.softmax(dim=-1).multinomial(1, generator=draw))


def _check_version() -> str:
    oldest = ".".join(map(str, OLDEST))
    try:
        import transformers
    except ImportError as error:
        raise EngineError(
            f"transformers cannot be imported: {error}", f"pip install 'transformers>={oldest}'"
        ) from None
    version: str = transformers.__version__
    if tuple(int(x) for x in version.split(".")[:2]) < OLDEST:
        raise EngineError(f"transformers {version} is too old", f"supported: {oldest} and later")
    return version
