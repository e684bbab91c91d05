"""The executable specification as an engine: it follows its contracts to the bit, so it is the side nobody can
doubt.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from diffcheck.base.bits import DTYPES, to_float32
from diffcheck.base.boundaries import graph
from diffcheck.base.checkpoint import FloatWeights
from diffcheck.base.errors import InputError
from diffcheck.base.models import resolve_model
from diffcheck.base.progress import Progress
from diffcheck.base.record import KvMapping, weight_digest
from diffcheck.base.samples import Sample, check_samples
from diffcheck.capture.adapter import CaptureResult, own_version, write_trace_of
from diffcheck.capture.live import (
    LiveInputs,
    check_extra,
    effective_config,
    finished_samples,
    object_record,
)
from diffcheck.capture.patches import apply_patches
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.recorder import Recorder
from diffcheck.capture.switches import Switch
from diffcheck.live_model.facts import Facts, mask_of
from diffcheck.live_model.rope import kept_positions, table_entry
from diffcheck.rows import Rows, expected_rows
from reference import operators as ops
from reference.contract.profiles import profile as find_profile
from reference.models.contracts import resolve_contracts
from reference.models.qwen3 import Sampling, forward
from reference.models.rows import interleaved_tables
from reference.models.weights import weight_shapes
from reference.primitives import inverse_frequencies
from reference.primitives.rope_scaling import float32_frequencies

DEFAULT_PROFILE = "strict-v1/fma32-seq"
#: Engine-specific switches.
EXTRA = {
    "block_size": Switch(int, 16, "tokens a page of the KV cache holds", least=1),
    "chunk": Switch(int, None, "tokens a chunk of prefill; by default whole prompts", least=1),
}
#: Fields that say in which format an operator hands its result on.
_LAST_ROUNDINGS = {"rounding.output", "rounding.residual", "rounding.storage", "rounding.read"}
#: Boundaries that the contracts hand on in float32 whatever the model's dtype.
_FLOAT32 = ("logits", "processed_logits", "logsumexp", "logprobs")
_FLOAT32_ENDS = (".partial", ".scores", ".topk_experts", ".topk_weights")


class Adapter:
    """The reference forward over a paged cache, in this process.

    Raises:
        InputError: unknown profile or option, a GPU device, or a model it does not specify.
    """

    def __init__(self, options: EngineOptions, progress: Progress) -> None:
        if options.device != "cpu":
            raise InputError(f"reference: device {options.device!r}: it runs on the CPU only", "use --device cpu")
        self.options = options
        self.extra = check_extra(options, EXTRA)
        try:
            self.profile = find_profile(options.profile or DEFAULT_PROFILE)
        except ValueError as error:
            raise InputError(f"reference: {error}", "list the profiles with rlk-diff contract list") from None
        folder, config = resolve_model(str(options.model))
        self.config = effective_config(config, options)
        if options.dtype not in DTYPES:
            raise InputError(f"reference: dtype {options.dtype!r} is unknown", f"choose one of {', '.join(DTYPES)}")
        checkpoint = FloatWeights(folder, options.dtype, options.weight_flips)
        progress("loading weights", 0, 0)
        self.weights = {name: checkpoint[name] for name, _ in weight_shapes(self.config)}
        apply_patches(options.patches, self.weights)

    def capture(self, plan: CapturePlan, progress: Progress) -> CaptureResult:
        """Score the plan's samples, in the plan's phase, and write the trace.

        Raises:
            InputError: a sample without response, or a contract override that names no boundary, field or value.
        """
        samples = plan.samples
        check_samples(samples, self.config.vocab_size, self.config.max_position_embeddings, scored=True)
        recorder = Recorder(plan, graph(self.config, self.options.tensor_parallel))
        started = time.monotonic()
        positions = [[p + plan.position_offset for p in range(len(s.token_ids))] for s in samples]
        observer = _Observer(recorder, self.options.dtype, sum(s.forward_length for s in samples), progress)
        try:
            forward(
                self.weights,
                self.config,
                [s.token_ids for s in samples],
                self.profile,
                phase=plan.phase,
                prompt_lengths=[len(s.prompt_token_ids) for s in samples],
                rope_positions=positions,
                page_size=self.extra["block_size"],
                chunk=self.extra["chunk"],
                sampling=Sampling(plan.temperature, plan.top_k or None, plan.top_p if plan.top_p < 1 else None),
                dtype=self.options.dtype,
                tensor_parallel=self.options.tensor_parallel,
                overrides=plan.contract_overrides,
                observe=observer,
            )
        except ValueError as error:
            raise InputError(f"reference: {error}", "see rlk-diff contract show for fields and values") from None
        seconds = {"forward": time.monotonic() - started}
        finished = finished_samples(recorder, samples)
        write_trace_of(
            plan,
            self.options,
            recorder,
            finished,
            self._record(plan, samples, positions),
            versions={"rlk": own_version(), "numpy": np.__version__},
            evidence=self._evidence(),
        )
        seconds["write"] = time.monotonic() - started - seconds["forward"]
        return CaptureResult(finished, plan.out, seconds)

    def close(self) -> None:
        """Nothing is held besides memory."""

    def _record(self, plan: CapturePlan, samples: tuple[Sample, ...], positions: list[list[int]]) -> Any:
        tokens, places = LiveInputs(), LiveInputs()
        rows = expected_rows(samples)["all"]
        fed = [samples[i].token_ids[p] for i, p in zip(rows.sample, rows.position, strict=True)]
        tokens.see(rows, np.array(fed))
        places.see(rows, np.array([positions[i][p] for i, p in zip(rows.sample, rows.position, strict=True)]))
        record = object_record(
            self.config,
            plan,
            samples,
            weights={name: weight_digest(w) for name, w in self.weights.items()},
            tokens=tokens,
            positions=places,
            rope_tables=self._rope_tables(plan, samples),
            layers=self._facts(),
            attention_mask=mask_of([self.config.window(n) for n in range(self.config.num_hidden_layers)]),
            padded_vocab=self.config.vocab_size,
            tensor_parallel=self.options.tensor_parallel,
        )
        size = self.extra["block_size"]
        lengths = [s.forward_length for s in samples]
        tables = interleaved_tables([-(-n // size) for n in lengths])
        slots = [[int(t[p // size]) * size + p % size for p in range(n)] for t, n in zip(tables, lengths, strict=True)]
        return replace(record, kv=KvMapping("paged", size, slots), top_p=plan.top_p, top_k=plan.top_k)

    def _rope_tables(self, plan: CapturePlan, samples: tuple[Sample, ...]) -> list[dict[str, Any]]:
        """The table of the queries' contract in each layer."""
        c, rope = self.config, self.config.rope
        contracts = resolve_contracts(c, self.profile, self.options.dtype, plan.contract_overrides)
        by_contract: dict[Any, list[int]] = {}
        for n in range(c.num_hidden_layers):
            by_contract.setdefault(contracts[f"layers.{n}.self_attn.q_rope"], []).append(n)
        kept = kept_positions(max(s.forward_length for s in samples) + plan.position_offset)
        entries = []
        for contract, layers in by_contract.items():
            table = ops.rope_table(np.array(kept), c.rotary_dim, c.rope_base, contract)
            exact = contract.primitives.table == "rlk"
            frequencies = inverse_frequencies(c.rotary_dim, rope) if exact else float32_frequencies(c.rotary_dim, rope)
            entries.append(
                table_entry(
                    layers,
                    frequencies=frequencies,
                    attention_factor=rope.attention_factor,
                    positions=kept,
                    cos=table.cos,
                    sin=table.sin,
                    dtype=contract.precision.table,
                )
            )
        return entries

    def _facts(self) -> dict[str, dict[str, Any]]:
        """What the forward is called with; the reference has no modules that could say otherwise."""
        c, facts = self.config, Facts()
        for n in range(c.num_hidden_layers):
            name = f"layers.{n}"
            norms = [f"{name}.input_layernorm", f"{name}.post_attention_layernorm"]
            norms += [f"{name}.self_attn.{x}_norm" for x in "qk"] if c.qk_norm else []
            for norm in norms:
                facts.add("epsilon", norm, c.rms_norm_eps)
            for x in "qkv":
                facts.add("bias", f"{name}.self_attn.{x}_proj", c.qkv_bias)
            facts.add("bias", f"{name}.self_attn.o_proj", c.o_bias)
            own = f"{name}.self_attn.attention"
            facts.add("scale", own, 1.0 / float(c.head_dim) ** 0.5)
            facts.add("heads", own, [c.num_attention_heads, c.num_key_value_heads])
            if c.is_sparse(n):
                facts.add("experts_per_token", f"{name}.mlp", c.num_experts_per_tok)
            for x in "kv":
                facts.add("kv_scale", f"{name}.self_attn.{x}_cache", 1.0)
        facts.add("epsilon", "norm", c.rms_norm_eps)
        return facts.found

    def _evidence(self) -> dict[str, Any]:
        contracts = self.profile.contracts(self.options.dtype)
        return {
            "profile": self.profile.name,
            "contracts": {name: contract.contract_id for name, contract in contracts.items()},
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "virtual_ranks": self.options.tensor_parallel,
            **self.extra,
        }


class _Observer:
    """Between the forward's observer and the recorder: values travel in the format they were rounded to."""

    def __init__(self, recorder: Recorder, dtype: str, rows: int, progress: Progress) -> None:
        self._recorder, self._dtype, self._rows, self._progress = recorder, dtype, rows, progress
        self._done = 0
        #: Boundaries whose last rounding was overridden: they may leave the model's dtype in some rows and not in
        #: others.
        overridden = [p for p, fields in recorder.plan.contract_overrides.items() if _LAST_ROUNDINGS & set(fields)]
        self._wide = {
            b.name for b in recorder.boundaries if any(fnmatchcase(b.name, pattern) for pattern in overridden)
        }

    def __call__(
        self, boundary: str, sample: np.ndarray[Any, Any], position: np.ndarray[Any, Any], values: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any] | None:
        if boundary == "embed_tokens":
            self._progress("reference forward", self._done, self._rows)
            self._done += len(values)
        if not self._recorder.wants(boundary):
            return None
        flat = np.ascontiguousarray(values, np.float32).reshape(len(values), -1)
        changed = self._recorder.observe(boundary, Rows(sample, position), self._narrow(boundary, flat), whole=True)
        if changed is None:
            return None
        wide = to_float32(changed, "bfloat16") if changed.dtype == np.uint16 else changed
        return np.ascontiguousarray(wide, np.float32).reshape(values.shape)

    def _narrow(self, boundary: str, values: np.ndarray[Any, Any]) -> Any:
        """The values in the model's dtype where the contract rounds to it, else as they are. Never rounds itself."""
        if self._dtype != "bfloat16" or boundary in _FLOAT32 or boundary.endswith(_FLOAT32_ENDS):
            return values
        bits = values.view(np.uint32)
        if boundary in self._wide or (bits & 0xFFFF).any():
            return values
        return (bits >> 16).astype(np.uint16)
