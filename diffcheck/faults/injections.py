"""Faults that no contract field describes: one operator of the live forward, recomputed on its live inputs.

Each function gets a laboratory (model, weights, base contracts) and returns interventions for the faulty side. An
intervention at an input only looks; the one at the output answers with what the faulty engine would have computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from diffcheck.base.bits import UIntArray, to_float32
from diffcheck.capture.interventions import Function, Intervention
from diffcheck.rows import IntArray, Rows
from diffcheck.trace.reader import Trace
from reference import operators as ops
from reference.checks import Float32Array
from reference.formats import FORMATS
from reference.models.config import ModelConfig
from reference.rounding import round_to


class Laboratory(Protocol):
    """What an injection may ask of the place where it is made (`diffcheck.faults.laboratory.Laboratory`)."""

    @property
    def config(self) -> ModelConfig: ...

    def contract(self, operator: str) -> Any:
        """The honest side's contract of ``operator``."""

    def weight(self, name: str) -> Float32Array:
        """A weight as the honest side holds it."""

    def places(self) -> list[tuple[int, int]]:
        """(sample, position) of every row."""

    def stale_trace(self) -> Trace:
        """A run with the last step's weights."""


_ATTENTION = "layers.0.self_attn"


def to_bits(values: Float32Array, dtype: str) -> UIntArray:
    """Patterns of ``values`` [rows, width], rounded to ``dtype``."""
    bits = np.ascontiguousarray(round_to(values, FORMATS[dtype])).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "bfloat16" else bits


class _Seen:
    """Rows of boundaries as the live forward produced them, by (sample, position)."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[tuple[int, int], Float32Array]] = {}

    def watch(self, boundary: str) -> Intervention:
        """An intervention that keeps the rows and changes nothing."""
        kept = self._rows.setdefault(boundary, {})

        def look(sample: IntArray, position: IntArray, bits: UIntArray, dtype: str) -> None:
            for row, at in zip(to_float32(bits, dtype), Rows(sample, position).places(), strict=True):
                kept[at] = row

        return Function(boundary, look)

    def rows(self, boundary: str, sample: Sequence[int], position: Sequence[int]) -> Float32Array:
        kept = self._rows[boundary]
        return np.stack([kept[at] for at in zip(sample, position, strict=True)])


def raw_logits(lab: Laboratory) -> tuple[Intervention, ...]:
    """Processed logits that were never divided by the temperature."""
    seen = _Seen()

    def raw(sample: IntArray, position: IntArray, _bits: UIntArray, dtype: str) -> UIntArray:
        return to_bits(seen.rows("logits", sample.tolist(), position.tolist()), dtype)

    return seen.watch("logits"), Function("processed_logits", raw)


def renormalised(lab: Laboratory) -> tuple[Intervention, ...]:
    """A log-sum-exp over the top-p set alone: smaller by the logarithm of the kept mass."""
    seen = _Seen()
    masking = lab.contract("processed_logits")

    def over_kept(sample: IntArray, position: IntArray, _bits: UIntArray, dtype: str) -> UIntArray:
        logits = seen.rows("processed_logits", sample.tolist(), position.tolist())
        kept = ops.processed_logits(logits, masking, top_p=0.9)
        return to_bits(ops.logsumexp(kept, lab.contract("logsumexp")).value[:, None], dtype)

    return seen.watch("processed_logits"), Function("logsumexp", over_kept)


def shifted_frequency(lab: Laboratory) -> tuple[Intervention, ...]:
    """The rotation with the second inverse frequency 1 ulp larger."""
    seen = _Seen()
    dim, theta = lab.config.head_dim, lab.config.rope_theta
    off = np.nextafter(np.float32(theta ** (-2 / dim)), np.float32(1))

    def rotate(part: str) -> Intervention:
        def rotated(sample: IntArray, position: IntArray, _bits: UIntArray, dtype: str) -> UIntArray:
            contract = lab.contract("rope")
            x = seen.rows(f"{_ATTENTION}.{part}_norm", sample.tolist(), position.tolist()).reshape(len(sample), -1, dim)
            table = ops.rope_table(position, dim, theta, contract)
            angle = (position.astype(np.float32) * off).astype(np.float64)
            cos, sin = table.cos.copy(), table.sin.copy()
            cos[:, 1], sin[:, 1] = np.cos(angle), np.sin(angle)
            return to_bits(ops.rope(x, ops.RopeTable(cos, sin), contract).reshape(len(sample), -1), dtype)

        return Function(f"{_ATTENTION}.{part}_rope", rotated)

    return seen.watch(f"{_ATTENTION}.q_norm"), seen.watch(f"{_ATTENTION}.k_norm"), rotate("q"), rotate("k")


def scaled_attention(lab: Laboratory) -> tuple[Intervention, ...]:
    """Attention with scores 1.6 times as large."""
    return _attention(lab, scale=1.6 / float(np.sqrt(lab.config.head_dim)))


def same_attention(lab: Laboratory) -> tuple[Intervention, ...]:
    """A control: attention recomputed as it was, which shows that recomputing injects nothing else."""
    return _attention(lab)


def same_projection(lab: Laboratory) -> tuple[Intervention, ...]:
    """A control: the projection of small batches recomputed as it was."""
    return _small_batches(lab, {})


def sinks(lab: Laboratory) -> tuple[Intervention, ...]:
    """Attention in which every head has a sink."""
    return _attention(lab, sinks=np.full(lab.config.num_attention_heads, 0.5, np.float32))


def _attention(lab: Laboratory, **changes: Any) -> tuple[Intervention, ...]:
    seen = _Seen()
    c, contract = lab.config, lab.contract("attention")

    def attend(sample: IntArray, position: IntArray, _bits: UIntArray, dtype: str) -> UIntArray:
        out = np.empty((len(sample), c.q_size), np.float32)
        for s in np.unique(sample).tolist():
            mine = np.flatnonzero(sample == s)
            past = range(int(position[mine].max()) + 1)
            keys, values = (
                seen.rows(f"{_ATTENTION}.{part}_cache", [s] * len(past), past).reshape(len(past), -1, c.head_dim)
                for part in "kv"
            )
            q = seen.rows(f"{_ATTENTION}.q_rope", [s] * mine.size, position[mine].tolist())
            kv = ops.DenseKeyValues(keys, values)
            got = ops.attention(q.reshape(mine.size, -1, c.head_dim), position[mine], kv, contract, **changes)
            out[mine] = got.reshape(mine.size, -1)
        return to_bits(out, dtype)

    watched = tuple(seen.watch(f"{_ATTENTION}.{name}") for name in ("q_rope", "k_cache", "v_cache"))
    return (*watched, Function(f"{_ATTENTION}.attention", attend))


def other_order_when_small(lab: Laboratory) -> tuple[Intervention, ...]:
    """Projections of fewer than 8 rows go downwards through K."""
    return _small_batches(lab, {"order.k": "descending"})


def split_k_when_small(lab: Laboratory) -> tuple[Intervention, ...]:
    """Projections of fewer than 8 rows are cut into 4 segments."""
    return _small_batches(lab, {"partition.segments": 4})


def _small_batches(lab: Laboratory, changes: dict[str, Any]) -> tuple[Intervention, ...]:
    seen = _Seen()
    contract = lab.contract("linear").replace(changes)
    weight = lab.weight("model.layers.0.self_attn.q_proj.weight")

    def project(sample: IntArray, position: IntArray, _bits: UIntArray, dtype: str) -> UIntArray | None:
        if len(sample) >= 8:
            return None
        x = seen.rows("layers.0.input_layernorm", sample.tolist(), position.tolist())
        return to_bits(ops.linear(x, weight, contract), dtype)

    return seen.watch("layers.0.input_layernorm"), Function(f"{_ATTENTION}.q_proj", project)


def stale_prefix(lab: Laboratory) -> tuple[Intervention, ...]:
    """Keys and values of the first 8 positions as the weights of the last step made them."""
    old = lab.stale_trace()

    def reread(part: str) -> Intervention:
        name = f"{_ATTENTION}.{part}_cache"
        at = {place: i for i, place in enumerate(lab.places())}
        stale = old.values(name)

        def read(sample: IntArray, position: IntArray, bits: UIntArray, _dtype: str) -> UIntArray:
            changed = bits.copy()
            for row in np.flatnonzero(position < 8):
                changed[row] = stale[at[int(sample[row]), int(position[row])]]
            return changed

        return Function(name, read)

    return reread("k"), reread("v")


def scaled_values(lab: Laboratory) -> tuple[Intervention, ...]:
    """V stored twice as large: a scale that was applied already."""
    seen = _Seen()

    def scaled(sample: IntArray, position: IntArray, _bits: UIntArray, dtype: str) -> UIntArray:
        return to_bits(2 * seen.rows(f"{_ATTENTION}.v_proj", sample.tolist(), position.tolist()), dtype)

    return seen.watch(f"{_ATTENTION}.v_proj"), Function(f"{_ATTENTION}.v_cache", scaled)


def late_logprobs(lab: Laboratory) -> tuple[Intervention, ...]:
    """Every token is handed the logprob of the token before it."""
    seen: dict[tuple[int, int], UIntArray] = {}

    def late(sample: IntArray, position: IntArray, bits: UIntArray, _dtype: str) -> UIntArray:
        changed = bits.copy()
        for row, (s, p) in enumerate(zip(sample.tolist(), position.tolist(), strict=True)):
            seen[s, p] = bits[row]
            changed[row] = seen.get((s, p - 1), bits[row])
        return changed

    return (Function("logprobs", late),)


def without_adapter(lab: Laboratory) -> tuple[Intervention, ...]:
    """Logits that lack a low-rank update of the head."""
    seen = _Seen()
    rng = np.random.default_rng(4)
    down, up = (
        rng.standard_normal(n).astype(np.float32) * np.float32(0.05)
        for n in (lab.config.hidden_size, lab.config.vocab_size)
    )

    def drop(sample: IntArray, position: IntArray, bits: UIntArray, dtype: str) -> UIntArray:
        x = seen.rows("norm", sample.tolist(), position.tolist())
        delta = (x.astype(np.float64) @ down.astype(np.float64))[:, None] * up
        return to_bits(to_float32(bits, dtype) - delta.astype(np.float32), dtype)

    return seen.watch("norm"), Function("logits", drop)
