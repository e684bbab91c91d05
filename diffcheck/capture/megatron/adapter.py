"""Megatron-core as the trainer runs it: whole sequences scored in one pass, local layer specification, no fusions."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcheck.base.boundaries import graph
from diffcheck.base.errors import EngineError, InputError
from diffcheck.base.models import resolve_model
from diffcheck.base.progress import Progress
from diffcheck.base.record import weight_digest
from diffcheck.base.samples import check_samples
from diffcheck.capture.adapter import CaptureResult, package_versions, write_trace_of
from diffcheck.capture.live import (
    Checkpoint,
    Taps,
    check_extra,
    effective_config,
    finished_samples,
    object_record,
    observe,
    torch_dtype,
)
from diffcheck.capture.megatron.build import build
from diffcheck.capture.megatron.taps import MegatronTaps
from diffcheck.capture.megatron.weights import check_ranks, pad_vocabulary, parameters, to_hf, to_megatron
from diffcheck.capture.patches import apply_patches
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.recorder import Recorder
from diffcheck.capture.strict import megatron_path
from diffcheck.capture.switches import Switch
from diffcheck.live_model.experts import check_experts
from diffcheck.live_model.facts import Facts, fold
from diffcheck.live_model.rope import kept_positions, live_entry, table_entry
from diffcheck.rows import Rows

Tensor = Any
#: Release series of megatron-core whose module tree is known here; one release of each is tested.
SUPPORTED = {"0.16": "0.16.1", "0.19": "0.19.2"}
#: Engine-specific switches.
EXTRA = {
    "vocab_multiple": Switch(int, 128, "make-vocab-size-divisible-by, a rank", least=1),
    "micro_batch": Switch(int, 1, "sequences scored together, right-padded", least=1),
    "threads": Switch(int, 0, "CPU threads a rank; 0: torch's own choice, divided among the ranks", least=0),
}
_NO_LOGSUMEXP = (
    "vocab_parallel_cross_entropy never forms it: it keeps the maximum and the logarithm of the shifted sum apart"
)


_NATIVE_LOGPROB = "vocab_parallel_cross_entropy of float32(logits) / temperature, padding columns at -inf"


class Adapter:
    """A live GPTModel on this rank. Every rank of a tensor-parallel group runs one and gets the same plans.

    Raises:
        EngineError: megatron-core is missing or of an unknown release, or the process group cannot be formed.
        InputError: an option it does not know, or sizes that cannot be split over the ranks.
    """

    def __init__(self, options: EngineOptions, progress: Progress) -> None:
        self.version = _check_version()
        self._strict = megatron_path(options)
        self.options = options
        self.extra = check_extra(options, EXTRA)
        folder, config = resolve_model(str(options.model))
        self.config = effective_config(config, options)
        check_experts(self.config, options.engine, options.tensor_parallel)
        self.ranks = options.tensor_parallel
        self.padded_vocab = pad_vocabulary(config, int(self.extra["vocab_multiple"]), self.ranks)
        try:
            check_ranks(config, self.padded_vocab, self.ranks)
        except ValueError as error:
            raise InputError(f"megatron: {error}", "choose another --tp") from None
        self._patches = Taps()
        self._owns_group = False
        try:
            progress("megatron: start", 0, 2)
            self._join_group()
            progress("megatron: load", 1, 2)
            self._patch_window()
            self.model = build(self.config, options, self.padded_vocab, self._strict)
            self._load(folder)
            apply_patches(options.patches, self.model)
        except BaseException:
            self.close()
            raise

    def capture(self, plan: CapturePlan, progress: Progress) -> CaptureResult:
        """Score ``plan``'s samples, whatever its phase: a trainer always sees whole sequences.

        Raises:
            InputError: a sample without a response: a trainer generates none; or contract overrides.
        """
        import torch

        if plan.contract_overrides:
            raise InputError("megatron: contracts of a live engine cannot be overridden", "leave --override out")
        samples = list(plan.samples)
        check_samples(samples, self.config.vocab_size, self.options.max_length, scored=True)
        recorder = Recorder(
            plan, graph(self.config, self.ranks), rank=self.rank, gather=self._gather if self.ranks > 1 else None
        )
        if self._strict is None:
            recorder.cannot_observe("logsumexp", _NO_LOGSUMEXP)
        else:
            self._strict.begin(self.model)
        seconds = {}
        start = time.perf_counter()
        step = int(self.extra["micro_batch"])
        with MegatronTaps(self.model, self.config, recorder, self.ranks, plan.position_offset) as taps, torch.no_grad():
            for first in range(0, len(samples), step):
                progress("megatron: score", first, len(samples))
                self._score(list(range(first, min(first + step, len(samples)))), plan, recorder, taps)
        progress("megatron: score", len(samples), len(samples))
        seconds["forward"] = time.perf_counter() - start
        start = time.perf_counter()
        record = object_record(
            self.config,
            plan,
            samples,
            weights={name: weight_digest(weight) for name, weight in self.hf_weights()},
            tokens=taps.tokens,
            positions=taps.positions,
            rope_tables=self._rope_tables(taps),
            layers=self._facts(),
            padded_vocab=self.padded_vocab,
            tensor_parallel=self.ranks,
            targets=taps.targets,
            attention_mask=taps.attention_mask,
        )
        if self._strict is not None:
            record.top_p, record.top_k = plan.top_p, plan.top_k
        evidence = self._evidence(-(-len(samples) // step)) | self._agreement(recorder)
        seconds["record"] = time.perf_counter() - start
        start = time.perf_counter()
        done = finished_samples(recorder, samples)
        if self.rank == 0:
            write_trace_of(
                plan,
                self.options,
                recorder,
                done,
                record,
                versions=package_versions("torch")
                | {"megatron-core": self.version, "python": platform.python_version()},
                evidence=evidence,
                # A trainer scores whole sequences, whatever the rollout did.
                phase="prefill",
            )
        seconds["write"] = time.perf_counter() - start
        return CaptureResult(done, plan.out, seconds)

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole weight) of the live model; all ranks must ask."""
        return to_hf(self._fetch, self.config)

    def close(self) -> None:
        """Leave the process group and undo the two adjustments."""
        import torch.distributed as dist

        if self._owns_group and dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        self._owns_group = False
        self.__dict__.pop("model", None)
        self._patches.__exit__(None, None, None)

    def _join_group(self) -> None:
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state, tensor_parallel

        on_cpu = self.options.device == "cpu"
        if not dist.is_initialized():
            backend = "gloo" if on_cpu else "nccl"
            if self.ranks == 1:
                # One rank talks to nobody: no port, so none that could be in use.
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            else:
                if int(os.environ.get("WORLD_SIZE", "1")) != self.ranks:
                    raise EngineError(
                        f"megatron: tensor parallelism {self.ranks} in a group of {os.environ.get('WORLD_SIZE', '1')}",
                        "start it through EngineSession, or with torchrun, one process a rank",
                    )
                dist.init_process_group(backend, timeout=datetime.timedelta(minutes=5))
            self._owns_group = True
        if dist.get_world_size() != self.ranks:
            raise EngineError(
                f"megatron: a process group of {dist.get_world_size()} is in use, {self.ranks} ranks are needed",
                "run the engine in a process of its own",
            )
        self.rank = dist.get_rank()
        if on_cpu:
            # Megatron-core asks CUDA for its device in one place that runs here: RoPE.
            self._patches.attribute(torch.cuda, "current_device", lambda _: lambda: torch.device("cpu"))
            threads = int(self.extra["threads"]) or max(1, torch.get_num_threads() // self.ranks)
            torch.set_num_threads(threads)
        else:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=self.ranks)
        # The inference tracker is the one that forks its random state without CUDA. Nothing here is random.
        tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=on_cpu, force_reset_rng=True)

    def _patch_window(self) -> None:
        """Megatron makes the mask of a window on CUDA, wherever the scores are."""
        if self.options.device == "cpu" and any(self.config.layer_windows):
            from megatron.core.fusions import fused_softmax

            self._patches.attribute(fused_softmax, "get_sliding_window_causal_mask", lambda _: _window_mask)

    def _load(self, folder: Path) -> None:
        import torch

        checkpoint = Checkpoint(folder, torch_dtype(self.options), self.options.weight_flips)
        live = dict(self.model.named_parameters())
        known = {parameter.megatron for parameter in parameters(self.config)}
        if foreign := sorted(known ^ set(live)):
            raise EngineError(
                f"megatron-core {self.version}: parameter {foreign[0]} is not where the weight mapping expects it",
                f"use one of {', '.join(SUPPORTED.values())}",
            )
        shards = to_megatron(checkpoint, self.config, padded_vocab=self.padded_vocab, ranks=self.ranks, rank=self.rank)
        with torch.no_grad():
            for name, value in shards:
                if live[name].shape != value.shape:
                    raise InputError(
                        f"{folder}: weights of {name} have shape {tuple(value.shape)}, the model needs "
                        f"{tuple(live[name].shape)}",
                        "config.json and the weights are not of the same model",
                    )
                live[name].copy_(value)

    def _score(self, batch: list[int], plan: CapturePlan, recorder: Recorder, taps: MegatronTaps) -> None:
        """One forward of some samples, up to the logprob of every next token."""
        import torch
        from megatron.core import tensor_parallel

        ids = [plan.samples[i].token_ids for i in batch]
        lengths = [len(x) - 1 for x in ids]
        width = max(lengths)
        rows = taps.begin(batch, lengths, width)
        device = self.options.device
        tokens, targets = (
            torch.tensor([list(part) + [0] * (width - len(part)) for part in parts], device=device)
            for parts in ([x[:-1] for x in ids], [next_tokens(x) for x in ids])
        )
        taps.targets.see(rows, targets)
        positions = torch.arange(width, device=device).expand(len(batch), width)
        future = torch.ones(1, 1, width, width, dtype=torch.bool, device=device).triu(1)
        logits = self.model(tokens, positions, future)
        if self._strict is not None:
            recorder.observe("logprobs", rows, self._strict_logprobs(logits, targets, plan, recorder, rows))
            return
        processed = logits.float() / plan.temperature
        self._mask_padding(processed)
        processed = observe(recorder, "processed_logits", rows, processed)
        loss = tensor_parallel.vocab_parallel_cross_entropy(processed, targets)
        recorder.observe("logprobs", rows, -loss.reshape(-1, 1))

    def _strict_logprobs(
        self, logits: Tensor, targets: Tensor, plan: CapturePlan, recorder: Recorder, rows: Rows
    ) -> Tensor:
        assert self._strict is not None
        logprobs = self._strict.logprobs(
            self.model,
            logits,
            targets,
            vocabulary=self.config.vocab_size,
            temperature=plan.temperature,
            top_k=plan.top_k or None,
            top_p=plan.top_p if plan.top_p < 1 else None,
            see=lambda name, value: observe(recorder, name, rows, value, whole=True),
        )
        return logprobs.reshape(-1, 1)

    def _mask_padding(self, logits: Tensor) -> None:
        """Columns past the real vocabulary take no part in the softmax."""
        width = logits.shape[-1]
        real = self.config.vocab_size - self.rank * width
        if real < width:
            logits[..., max(real, 0) :] = -float("inf")

    def _fetch(self, name: str) -> Sequence[Tensor]:
        parameter = self.model.get_parameter(name).detach()
        return self._gather(parameter) if self.ranks > 1 else [parameter]

    def _gather(self, tensor: Tensor) -> Sequence[Tensor]:
        """Every rank's tensor, moved as bytes over Megatron's tensor-parallel group."""
        import torch
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        local = tensor.contiguous().view(torch.uint8)
        parts = [torch.empty_like(local) for _ in range(self.ranks)]
        torch.distributed.all_gather(parts, local, group=group)
        return [part.view(tensor.dtype) for part in parts]

    def _agreement(self, recorder: Recorder) -> dict[str, Any]:
        """Whether all ranks hold the same bits of what each of them has whole."""
        if self.ranks == 1:
            return {}
        import torch

        mine = recorder.digests()
        everyone: list[dict[str, str]] = [{} for _ in range(self.ranks)]
        torch.distributed.all_gather_object(everyone, mine)
        disagree = [name for name in mine if any(other.get(name) != mine[name] for other in everyone)]
        return {"ranks_disagree_at": disagree}

    def _rope_tables(self, taps: MegatronTaps) -> list[dict[str, Any]]:
        """The table of the last forwards: Megatron rotates all layers by the same angles."""
        import torch

        layers = range(self.config.num_hidden_layers)
        if self._strict is not None:
            live = getattr(self._strict.live_operators(self.model), "live_rope", lambda: None)()
            if live is not None and live["frequencies"] is None:
                # The table is that of an embedding changed since it was built: of the angles that it gave.
                live["frequencies"] = taps.frequencies()
            return [] if live is None else [live_entry(layers, live)]
        angles = taps.angles
        if angles is None:
            return []
        where = taps.positions_of_angles()
        at = {p: row for row, p in enumerate(where)}
        kept = [p for p in kept_positions(max(where) + 1) if p in at]
        rows = angles[[at[p] for p in kept]]
        dtype = torch_dtype(self.options)
        cos, sin = ((f(rows) * taps.attention_factor).to(dtype).float() for f in (torch.cos, torch.sin))
        return [
            table_entry(
                layers,
                frequencies=taps.frequencies(),
                attention_factor=taps.attention_factor,
                positions=kept,
                cos=cos.cpu().numpy(),
                sin=sin.cpu().numpy(),
                dtype=self.options.dtype,
            )
        ]

    def _facts(self) -> dict[str, dict[str, Any]]:
        """What the live modules of every layer compute with."""
        facts = Facts()
        for n, layer in enumerate(self.model.decoder.layers):
            name, attention = f"layers.{n}", layer.self_attention
            core = attention.core_attention
            facts.norm(f"{name}.input_layernorm", layer.input_layernorm)
            facts.norm(f"{name}.post_attention_layernorm", layer.pre_mlp_layernorm)
            if self.config.qk_norm:
                facts.norm(f"{name}.self_attn.q_norm", attention.q_layernorm)
                facts.norm(f"{name}.self_attn.k_norm", attention.k_layernorm)
            for x in "qkv":
                facts.linear(f"{name}.self_attn.{x}_proj", attention.linear_qkv)
            facts.linear(f"{name}.self_attn.o_proj", attention.linear_proj)
            if hasattr(layer.mlp, "linear_fc1"):
                for x in ("gate", "up"):
                    facts.linear(f"{name}.mlp.{x}_proj", layer.mlp.linear_fc1)
                facts.linear(f"{name}.mlp.down_proj", layer.mlp.linear_fc2)
            else:
                facts.add("experts_per_token", f"{name}.mlp", int(layer.mlp.router.topk))
            own = f"{name}.self_attn.attention"
            scale = getattr(core, "softmax_scale", None)
            factor = getattr(getattr(core, "scale_mask_softmax", None), "scale", None) or 1.0
            strict_scale = 1.0 / float(self.config.head_dim) ** 0.5
            facts.add("scale", own, strict_scale if scale is None else float(scale) * float(factor))
            heads = [attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition]
            facts.add("heads", own, [h * self.ranks for h in heads])
            facts.add("sinks", own, getattr(core, "softmax_offset", None) is not None)
        facts.norm("norm", self.model.decoder.final_layernorm)
        facts.linear("logits", self.model.output_layer)
        return facts.found

    def _evidence(self, forwards: int) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        layers = self.model.decoder.layers
        dtypes = {str(p.dtype).removeprefix("torch.") for p in self.model.parameters()}
        return {
            "forward": "training: whole sequences in one pass, in every phase",
            "layer_spec": "local",
            "attention": fold(
                {f"layer {n}": type(x.self_attention.core_attention).__name__ for n, x in enumerate(layers)}
            ),
            "norm": fold({f"layer {n}": _class_name(x.input_layernorm) for n, x in enumerate(layers)}),
            "logprob": _NATIVE_LOGPROB if self._strict is None else "log-sum-exp and logprob operators",
            "parameter_dtypes": sorted(dtypes),
            "device": self.options.device,
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "backend": dist.get_backend(),
            "world_size": dist.get_world_size(),
            "micro_batch": self.extra["micro_batch"],
            "sequence_parallel": False,
            **({} if self._strict is None else {"strict": self._strict.evidence(self.model, forwards)}),
        }


def next_tokens(ids: Sequence[int]) -> Sequence[int]:
    """The token that each position predicts."""
    return ids[1:]


def check_release(found: str | None) -> str:
    """``found``, the installed version of Megatron-core.

    Raises:
        EngineError: none is installed, or one of a release series that is not known here.
    """
    remedy = f"supported releases: {', '.join(f'{v} ({s}.x)' for s, v in SUPPORTED.items())}"
    if found is None:
        raise EngineError("megatron-core is not installed", f"pip install megatron-core; {remedy}")
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise EngineError(f"megatron-core {found} is not supported", remedy)
    return found


def _check_version() -> str:
    try:
        import megatron.core
    except ImportError as error:
        raise EngineError(f"megatron-core cannot be imported: {error}", "pip install megatron-core") from None
    return check_release(str(megatron.core.__version__))


def _window_mask(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """As Megatron's ``get_sliding_window_causal_mask``, on the CPU: True where a query must not look."""
    import torch

    seen = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries - window[0])
    return ~seen.tril(keys - queries + window[1])


def _class_name(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
