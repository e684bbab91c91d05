"""What every engine's capture must satisfy: each boundary means what its name says, and a change at one is a change at
that one. Used by the tests of the adapters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diffcheck.base.bits import to_float32
from diffcheck.base.boundaries import Boundary, branch_of
from diffcheck.base.samples import Sample
from diffcheck.capture.interventions import BitFlip
from diffcheck.capture.plan import CapturePlan
from diffcheck.localize import localize
from diffcheck.rows import expected_rows
from diffcheck.trace.reader import Trace
from diffcheck.trace.schema import HEADER
from reference.models.config import ModelConfig
from tests.schemas import conforms

FloatArray = npt.NDArray[np.float64]
#: Where the engines' tests run: "cpu", or "cuda" on a machine that has it.
DEVICE = os.environ.get("RLK_TEST_DEVICE", "cpu")
#: Prompt and response lengths: several short rows, one longer.
LENGTHS = ((5, 4), (11, 6), (3, 5))
#: Where faults are injected: a response position in the middle of the longest sample.
SAMPLE, POSITION = 1, 12


@dataclass(frozen=True)
class Tolerance:
    """What rounding may do between an observed value and its recomputation in float64."""

    relative: float
    absolute: float


#: bfloat16 keeps 8 bits, and sums of its values a little less.
BFLOAT16 = Tolerance(2**-6, 0.03)
FLOAT32 = Tolerance(1e-4, 1e-4)


def scored_samples(config: ModelConfig, seed: int = 5) -> tuple[Sample, ...]:
    rng = np.random.default_rng(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(3, config.vocab_size, n))

    return tuple(Sample(ids(prompt), ids(response)) for prompt, response in LENGTHS)


@dataclass(frozen=True)
class Seen:
    """A trace at level full, by boundary: float values [rows, width] and the rows' samples."""

    trace: Trace
    config: ModelConfig
    weights: Callable[[str], FloatArray]
    #: Whether a row-parallel bias is part of the first rank's product, or added to the sum of all ranks.
    bias_on_first_rank: bool = False

    def __getitem__(self, name: str) -> FloatArray:
        return to_float32(self.trace.values(name), self.trace.entry(name).dtype).astype(np.float64)

    def round(self, values: FloatArray, like: str) -> npt.NDArray[np.float32]:
        """Round float32 ``values`` once to the dtype of boundary ``like`` (RNE)."""
        single = values.astype(np.float32)
        if self.trace.entry(like).dtype == "float32":
            return single
        u = single.view(np.uint32).astype(np.uint64)
        rounded = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
        return rounded.astype(np.uint32).view(np.float32)


def check_meaning(seen: Seen, tolerance: Tolerance = BFLOAT16, changed: str = "") -> None:
    """Recompute each boundary from the observed inputs and the checkpoint in float64.

    Copies and residual adds must agree in bits; the rest within ``tolerance``, which a wrong layout exceeds by orders
    of magnitude.

    Args:
        changed: a boundary that an intervention replaced. It is not what its inputs give, but all its readers must
            have read the replacement.
    """
    conforms("trace", json.loads((seen.trace.folder / HEADER).read_text()))
    c = seen.config
    record = seen.trace.header.object
    tokens = np.concatenate([np.array(ids) for ids in record.token_ids])
    positions = np.concatenate([np.array(p) for p in record.positions])

    def close(name: str, expected: FloatArray) -> None:
        if name != changed:
            np.testing.assert_allclose(
                seen[name], expected, rtol=tolerance.relative, atol=tolerance.absolute, err_msg=name
            )

    def exact(name: str, expected: npt.NDArray[np.floating]) -> None:
        if name != changed:
            np.testing.assert_array_equal(seen[name], expected.astype(np.float64), err_msg=name)

    def norm(name: str, source: FloatArray, weight: str, width: int) -> None:
        rows = source.reshape(-1, width)
        scaled = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + c.rms_norm_eps) * seen.weights(weight)
        close(name, scaled.reshape(source.shape))

    def linear(name: str, source: FloatArray, weight: str, bias: bool = False) -> None:
        product = source @ seen.weights(f"{weight}.weight").T
        close(name, product + seen.weights(f"{weight}.bias") if bias else product)

    def row_parallel(name: str, source: FloatArray, weight: str, bias: bool = False) -> None:
        if f"{name}.partial" not in seen.trace:
            linear(name, source, weight, bias)
            return
        ranks = seen.trace.header.tensor_parallel
        inputs, columns = np.split(source, ranks, axis=1), np.split(seen.weights(f"{weight}.weight"), ranks, axis=1)
        partials = [x @ w.T for x, w in zip(inputs, columns, strict=True)]
        if bias and seen.bias_on_first_rank:
            partials[0], bias = partials[0] + seen.weights(f"{weight}.bias"), False
        close(f"{name}.partial", np.concatenate(partials, axis=1))
        total = np.stack(np.split(seen[f"{name}.partial"], ranks, axis=1)).sum(axis=0)
        close(name, total + seen.weights(f"{weight}.bias") if bias else total)

    exact("embed_tokens", seen.weights("model.embed_tokens.weight")[tokens])
    stream = "embed_tokens"
    for n in range(c.num_hidden_layers):
        layer, hf = f"layers.{n}", f"model.layers.{n}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        norm(f"{layer}.input_layernorm", seen[stream], f"{hf}.input_layernorm.weight", c.hidden_size)
        for x in "qkv":
            linear(f"{attn}.{x}_proj", seen[f"{layer}.input_layernorm"], f"{hf}.self_attn.{x}_proj", c.qkv_bias)
        for x in "qk":
            source = f"{attn}.{x}_proj"
            if c.qk_norm:
                norm(f"{attn}.{x}_norm", seen[source], f"{hf}.self_attn.{x}_norm.weight", c.head_dim)
                source = f"{attn}.{x}_norm"
            close(f"{attn}.{x}_rope", _rotate(seen[source], positions, c))
        exact(f"{attn}.k_cache", seen[f"{attn}.k_rope"])
        exact(f"{attn}.v_cache", seen[f"{attn}.v_proj"])
        close(f"{attn}.attention", _attend(seen, attn))
        row_parallel(f"{attn}.o_proj", seen[f"{attn}.attention"], f"{hf}.self_attn.o_proj", c.o_bias)
        total = seen.round(seen[stream] + seen[f"{attn}.o_proj"], stream)
        exact(f"{layer}.attn_residual", total)
        weight = f"{hf}.post_attention_layernorm.weight"
        norm(f"{layer}.post_attention_layernorm", seen[f"{layer}.attn_residual"], weight, c.hidden_size)
        source, branch = seen[f"{layer}.post_attention_layernorm"], branch_of(c, n)
        if c.is_sparse(n):
            _check_experts(seen, n, source, close, exact)
        else:
            for x in ("gate", "up"):
                linear(f"{mlp}.{x}_proj", source, f"{hf}.mlp.{x}_proj")
            gate = seen[f"{mlp}.gate_proj"]
            close(f"{mlp}.act", gate / (1 + np.exp(-gate)) * seen[f"{mlp}.up_proj"])
            row_parallel(f"{mlp}.down_proj", seen[f"{mlp}.act"], f"{hf}.mlp.down_proj")
        exact(f"{layer}.mlp_residual", seen.round(seen[f"{layer}.attn_residual"] + seen[branch], stream))
        stream = f"{layer}.mlp_residual"
    norm("norm", seen[stream], "model.norm.weight", c.hidden_size)
    linear("logits", seen["norm"][_active(seen)], "model.embed_tokens" if c.tie_word_embeddings else "lm_head")
    close("processed_logits", seen["logits"] / record.temperature)
    lse, chosen = _log_sum_exp(seen)
    if "logsumexp" in seen.trace:
        close("logsumexp", lse)
        lse = seen["logsumexp"]
    if changed != "logprobs":
        np.testing.assert_allclose(seen["logprobs"], chosen - lse, rtol=1e-5, atol=1e-5, err_msg="logprobs")


def _check_experts(
    seen: Seen,
    n: int,
    source: FloatArray,
    close: Callable[[str, FloatArray], None],
    exact: Callable[[str, npt.NDArray[np.floating]], None],
) -> None:
    """A sparse block: the choice is that of the observed ranks, an expert's rows are those of the tokens that chose it
    and NaN for all others, and the sum is weighted. What an engine does not show is recomputed.
    """
    c, mlp, hf = seen.config, f"layers.{n}.mlp", f"model.layers.{n}.mlp"

    def shown(name: str, expected: FloatArray) -> FloatArray:
        if name not in seen.trace:
            return expected
        close(name, expected)
        return seen[name]

    gate = shown(f"{mlp}.gate", source @ seen.weights(f"{hf}.gate.weight").T)
    scores = np.exp(gate - gate.max(axis=1, keepdims=True))
    scores = shown(f"{mlp}.scores", scores / scores.sum(axis=1, keepdims=True))
    ranked = scores if f"{mlp}.scores" in seen.trace else gate
    experts = seen[f"{mlp}.topk_experts"].astype(int)
    assert (np.diff(experts, axis=1) > 0).all()
    chosen = np.zeros(gate.shape, bool)
    np.put_along_axis(chosen, experts, True, axis=1)
    assert (np.where(chosen, ranked, np.inf).min(axis=1) >= np.where(chosen, -np.inf, ranked).max(axis=1)).all()
    weights = np.where(chosen, scores, np.nan)
    if c.norm_topk_prob:
        weights = weights / np.nansum(weights, axis=1, keepdims=True)
    weights = shown(f"{mlp}.topk_weights", weights)
    total = np.zeros(source.shape)
    for e in range(c.num_experts):
        own, mine = f"{mlp}.experts.{e}", chosen[:, e, None]
        rows = np.where(mine, source, np.nan)
        if f"{own}.input" in seen.trace:
            exact(f"{own}.input", rows)
            rows = seen[f"{own}.input"]
        g, u = (
            shown(f"{own}.{x}_proj", rows @ seen.weights(f"{hf}.experts.{e}.{x}_proj.weight").T) for x in ("gate", "up")
        )
        act = shown(f"{own}.act", g / (1 + np.exp(-g)) * u)
        down = shown(f"{own}.down_proj", act @ seen.weights(f"{hf}.experts.{e}.down_proj.weight").T)
        total += np.where(mine, weights[:, e, None] * down, 0)
    shown(f"{mlp}.combine", total)


def _active(seen: Seen) -> npt.NDArray[np.bool_]:
    return np.concatenate([np.array(a, bool) for a in seen.trace.header.object.active])


def _log_sum_exp(seen: Seen) -> tuple[FloatArray, FloatArray]:
    """Per response row, [rows, 1]: log-sum-exp of the processed logits, and the processed logit of the target."""
    processed = seen["processed_logits"]
    targets = np.concatenate([np.array(t) for t in seen.trace.header.object.target_ids])
    top = processed.max(axis=1, keepdims=True)
    total = top + np.log(np.exp(processed - top).sum(axis=1, keepdims=True))
    return total, processed[np.arange(targets.size), targets][:, None]


def _rotate(x: FloatArray, positions: npt.NDArray[np.int_], c: ModelConfig) -> FloatArray:
    half = c.head_dim // 2
    angles = positions[:, None, None] * c.rope_theta ** (-np.arange(half) / half)
    heads = x.reshape(len(x), -1, c.head_dim)
    a, b = heads[..., :half], heads[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    rotated: FloatArray = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.reshape(x.shape)


def _attend(seen: Seen, attn: str) -> FloatArray:
    """Softmax attention over the observed caches, per sample, causal."""
    c = seen.config
    rows = expected_rows([Sample.from_json(s) for s in seen.trace.header.samples])["all"]
    q = seen[f"{attn}.q_rope"].reshape(len(rows), c.num_attention_heads, c.head_dim)
    k = seen[f"{attn}.k_cache"].reshape(len(rows), c.num_key_value_heads, c.head_dim)
    v = seen[f"{attn}.v_cache"].reshape(len(rows), c.num_key_value_heads, c.head_dim)
    group = c.num_attention_heads // c.num_key_value_heads
    out = np.empty_like(q)
    for r in range(len(rows)):
        visible = (rows.sample == rows.sample[r]) & (rows.position <= rows.position[r])
        for h in range(c.num_attention_heads):
            scores = k[visible, h // group] @ q[r, h] / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            out[r, h] = weights / weights.sum() @ v[visible, h // group]
    return out.reshape(len(rows), -1)


def fault_at(node: Boundary, honest: Trace) -> BitFlip:
    """A flip of an exponent bit of the largest element of one row: large enough that nothing absorbs it."""
    entry = honest.entry(node.name)
    row = _row(node, honest)
    values = to_float32(honest.values(node.name)[row], entry.dtype)
    index = int(np.argmax(np.abs(values)))
    if node.operator in ("lm_head", "processed_logits"):
        index = honest.header.object.target_ids[SAMPLE][POSITION - (LENGTHS[SAMPLE][0] - 1)]
    return BitFlip(node.name, SAMPLE, POSITION, index, bit=24 if entry.dtype == "float32" else 8)


def check_fault(node: Boundary, fault: BitFlip, honest: Trace, after: Seen) -> None:
    """The fault changed this one bit of this boundary; all its readers read the changed value; the logprob of the
    position moved, and none of another sample or an earlier position; localize names it.
    """
    changed = after.trace
    check_meaning(after, changed=node.name)
    a, b = honest.values(node.name), changed.values(node.name)
    difference = a ^ b
    row = _row(node, honest)
    assert difference[row, fault.index] == 1 << fault.bit
    assert np.flatnonzero(difference.any(axis=1)).tolist() == [row]
    assert np.flatnonzero(difference[row]).tolist() == [fault.index]
    rows = expected_rows([Sample.from_json(s) for s in honest.header.samples])["response"]
    moved = (honest.values("logprobs") != changed.values("logprobs")).any(axis=1)
    assert moved[(rows.sample == SAMPLE) & (rows.position == POSITION)].all()
    reachable = (rows.sample == SAMPLE) & (rows.position >= POSITION)
    assert not moved[~reachable].any()
    verdict = localize(honest, changed)
    first = verdict.first_divergence
    assert first is not None
    assert (first.boundary, first.sample, first.position, first.index) == (
        node.name,
        SAMPLE,
        POSITION,
        fault.index,
    )


def _row(node: Boundary, trace: Trace) -> int:
    rows = expected_rows([Sample.from_json(s) for s in trace.header.samples])[node.rows]
    return int(np.flatnonzero((rows.sample == SAMPLE) & (rows.position == POSITION))[0])


def digests(trace: Trace) -> dict[str, str]:
    return {name: entry.sha256 for name, entry in trace.header.boundaries.items()}


def plan_for(config: ModelConfig, out: Path, **changes: object) -> CapturePlan:
    return CapturePlan(**{"samples": scored_samples(config), "out": out, "phase": "prefill", **changes})  # type: ignore[arg-type]
