"""The whole forward: equal bits however it is scheduled, observed and replaceable at every boundary."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffcheck.base.boundaries import graph
from reference.checks import Float32Array
from reference.contract import profile
from reference.models.qwen3 import ForwardResult, Qwen3, Sampling, forward
from reference.models.rows import PagedState, Rows
from tests.reference.exact import assert_same_bits, bits, same_bits
from tests.reference.models.tiny_model import QWEN3, batch, config, weights

WEIGHTS = weights(QWEN3)
BATCH, PROMPTS = batch(18, 5, 70), [10, 2, 64]
STRICT = profile("strict-v1")
PROFILES = ("strict-v1/fma32-seq", "strict-v1/mfma-cdna3-g8", "strict-v1/hopper-k16")


def score(name: str = "strict-v1", **settings_: Any) -> ForwardResult:
    arguments: dict[str, Any] = {"weights": WEIGHTS, "config": QWEN3, "batch": BATCH, "prompt_lengths": PROMPTS}
    return forward(profile=profile(name), **{**arguments, **settings_})


EXPECTED = {name: score(name).logprobs for name in PROFILES}


def assert_expected(result: ForwardResult, name: str = "strict-v1/fma32-seq") -> None:
    assert len(result.logprobs) == len(EXPECTED[name])
    for got, expected in zip(result.logprobs, EXPECTED[name], strict=True):
        assert_same_bits(got, expected)


class Recording:
    """Every boundary as {(sample, position): row}."""

    def __init__(self, **replace: Any) -> None:
        self.rows: dict[str, dict[tuple[int, int], Float32Array]] = defaultdict(dict)
        self.replace = replace

    def __call__(self, name: str, sample: Any, position: Any, values: Float32Array) -> Float32Array | None:
        replacement = self.replace.get(name.replace(".", "__"))
        changed = None if replacement is None else replacement(sample, position, values)
        for s, p, row in zip(sample, position, values if changed is None else changed, strict=True):
            assert (s, p) not in self.rows[name]
            self.rows[name][int(s), int(p)] = row.copy()
        return changed


@pytest.mark.parametrize("name", PROFILES)
def test_decode_equals_prefill(name: str) -> None:
    assert_expected(score(name, phase="decode", page_size=7), name)


@settings(max_examples=10, deadline=None)
@given(
    page=st.sampled_from([1, 5, 16, 64]),
    chunk=st.sampled_from([None, 9, 64]),
    phase=st.sampled_from(["prefill", "decode"]),
    ranks=st.sampled_from([1, 2, 4, 8]),
)
def test_pages_chunks_phase_and_ranks_do_not_matter(page: int, chunk: int | None, phase: str, ranks: int) -> None:
    assert_expected(score(page_size=page, chunk=chunk, phase=phase, tensor_parallel=ranks))


def test_batch_order_and_composition_do_not_matter() -> None:
    for order in ([2, 0, 1], [1], [0, 2]):
        result = score(batch=[BATCH[i] for i in order], prompt_lengths=[PROMPTS[i] for i in order])
        for got, i in zip(result.logprobs, order, strict=True):
            assert_same_bits(got, EXPECTED["strict-v1/fma32-seq"][i])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_yields_every_boundary_of_the_dataflow_graph(phase: str, ranks: int) -> None:
    seen = Recording()
    score(phase=phase, observe=seen, tensor_parallel=ranks)
    expected = {b.name: b for b in graph(QWEN3, ranks)}
    assert set(seen.rows) == set(expected)
    fed = {(s, p) for s, tokens in enumerate(BATCH) for p in range(len(tokens) - 1)}
    scored = {(s, p) for s, tokens in enumerate(BATCH) for p in range(PROMPTS[s] - 1, len(tokens) - 1)}
    for name, boundary in expected.items():
        assert set(seen.rows[name]) == (fed if boundary.rows == "all" else scored), name
        assert {row.size for row in seen.rows[name].values()} == {boundary.width}, name


def test_boundaries_are_equal_in_both_phases() -> None:
    prefill, decode = Recording(), Recording()
    score(observe=prefill)
    score(observe=decode, phase="decode", page_size=3, chunk=4)
    for name, rows in prefill.rows.items():
        for where, row in rows.items():
            assert same_bits(row, decode.rows[name][where]), (name, where)


def test_bfloat16_boundaries_hold_bfloat16_values() -> None:
    seen = Recording()
    score(observe=seen)
    for name, rows in seen.rows.items():
        wide = any((bits(row) & 0xFFFF).any() for row in rows.values())
        assert wide == (name in ("logits", "processed_logits", "logsumexp", "logprobs")), name


@pytest.mark.parametrize("boundary", [b.name for b in graph(QWEN3)])
def test_a_replaced_value_flows_on_and_changes_nothing_before(boundary: str) -> None:
    def flip(sample: Any, position: Any, values: Float32Array) -> Float32Array | None:
        hit = (sample == 2) & (position == 66)
        if not hit.any():
            return None
        changed = values.copy()
        changed[hit, -1] = np.where(changed[hit, -1] > 0, -1, 1) * np.float32(4)
        return changed

    plain, changed = Recording(), Recording(**{boundary.replace(".", "__"): flip})
    score(observe=plain)
    result = score(observe=changed)
    order = [b.name for b in graph(QWEN3)]
    at = order.index(boundary)
    for name in order[:at]:
        assert all(same_bits(row, changed.rows[name][w]) for w, row in plain.rows[name].items()), name
    rows = [w for w, row in plain.rows[boundary].items() if not same_bits(row, changed.rows[boundary][w])]
    assert rows == [(2, 66)]
    assert not same_bits(result.logprobs[2], EXPECTED["strict-v1/fma32-seq"][2])
    assert_same_bits(result.logprobs[0], EXPECTED["strict-v1/fma32-seq"][0])


def test_a_replaced_residual_reaches_a_fused_norm() -> None:
    """In float32 the norm may take the unrounded sum; what an observer put in its place still counts."""

    def zero(sample: Any, position: Any, values: Float32Array) -> Float32Array:
        return np.zeros_like(values)

    seen = Recording(layers__0__attn_residual=zero)
    score(observe=seen, dtype="float32", weights=weights(QWEN3, "float32"))
    assert all((row == 0).all() for row in seen.rows["layers.0.post_attention_layernorm"].values())


def test_override_changes_exactly_one_boundary_first() -> None:
    plain, changed = Recording(), Recording()
    score(observe=plain)
    score(observe=changed, overrides={"layers.1.mlp.act": {"rounding.silu": "bfloat16"}})
    order = [b.name for b in graph(QWEN3)]
    different = [n for n in order if any(not same_bits(r, changed.rows[n][w]) for w, r in plain.rows[n].items())]
    assert different[0] == "layers.1.mlp.act"


@pytest.mark.parametrize(
    ("pattern", "fields", "message"),
    [
        ("layers.*.mlp.activation", {"rounding.silu": "bfloat16"}, "no boundary of the model matches it"),
        ("layers.*.mlp.act", {"rounding.gate": "bfloat16"}, "swiglu at layers.0.mlp.act has no field 'rounding.gate'"),
        ("layers.*.mlp.act", {"rounding.silu": "int8"}, "rounding.silu must be one of"),
    ],
)
def test_bad_override(pattern: str, fields: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(overrides={pattern: fields})


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "Qwen2ForCausalLM", "qk_norm": False, "qkv_bias": True},
        {"architecture": "LlamaForCausalLM", "qk_norm": False},
        {"o_bias": True, "qkv_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 2},
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_architectures(changes: dict[str, Any], dtype: str) -> None:
    c = config(**changes)
    settings_ = {"config": c, "weights": weights(c, dtype), "dtype": dtype}
    prefill, decode = score(**settings_), score(phase="decode", tensor_parallel=2, **settings_)
    for left, right in zip(prefill.logprobs, decode.logprobs, strict=True):
        assert_same_bits(left, right)


def test_is_close_to_a_float64_forward() -> None:
    c = config(num_key_value_heads=4)
    w = weights(c, "float32")
    tokens = BATCH[2]
    got = score(config=c, weights=w, dtype="float32", batch=[tokens], prompt_lengths=[1]).logprobs[0]
    assert np.abs(got - float64_logprobs(c, w, tokens)).max() < 2e-5


def float64_logprobs(c: Any, w: dict[str, Float32Array], tokens: list[int]) -> np.ndarray:
    """Textbook forward in float64."""
    w64 = {name: value.astype(np.float64) for name, value in w.items()}
    count, d = len(tokens), c.head_dim

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + c.rms_norm_eps) * weight

    angle = np.arange(count)[:, None] * c.rope_theta ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w64["model.embed_tokens.weight"][tokens]
    for n in range(c.num_hidden_layers):
        layer = f"model.layers.{n}"
        attn = f"{layer}.self_attn"
        h = norm(x, w64[f"{layer}.input_layernorm.weight"])
        q, k, v = ((h @ w64[f"{attn}.{p}_proj.weight"].T).reshape(count, -1, d) for p in "qkv")
        q, k = rotate(norm(q, w64[f"{attn}.q_norm.weight"])), rotate(norm(k, w64[f"{attn}.k_norm.weight"]))
        k, v = (np.repeat(part, q.shape[1] // k.shape[1], axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(count, -1) @ w64[f"{attn}.o_proj.weight"].T
        h = norm(x, w64[f"{layer}.post_attention_layernorm.weight"])
        gate, up = h @ w64[f"{layer}.mlp.gate_proj.weight"].T, h @ w64[f"{layer}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w64[f"{layer}.mlp.down_proj.weight"].T
    logits = norm(x, w64["model.norm.weight"]) @ w64["lm_head.weight"].T
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logprobs[np.arange(count - 1), tokens[1:]]


def test_sampling_settings_reach_the_logprobs() -> None:
    warm = score(sampling=Sampling(temperature=0.7))
    assert not same_bits(warm.logprobs[0], EXPECTED["strict-v1/fma32-seq"][0])
    masked = np.concatenate(score(sampling=Sampling(top_k=50)).logprobs)
    assert np.isneginf(masked).any() and not np.isneginf(masked).all()


def test_rope_positions_can_be_shifted() -> None:
    """Scores depend on relative positions: a common shift changes bits, not values."""
    shifted = score(rope_positions=[[p + 3 for p in range(len(t))] for t in BATCH])
    same = [same_bits(a, b) for a, b in zip(shifted.logprobs, EXPECTED["strict-v1/fma32-seq"], strict=True)]
    assert not all(same)
    assert np.abs(shifted.logprobs[0] - EXPECTED["strict-v1/fma32-seq"][0]).max() < 0.2


def test_steps_can_be_driven_one_by_one() -> None:
    """What an engine does to generate: greedy tokens, each fed back."""
    model = Qwen3(WEIGHTS, QWEN3, STRICT)
    state, tokens = PagedState.create(QWEN3, [20]), list(BATCH[0][:4])
    fed = 0
    while len(tokens) < 12:
        positions = np.arange(fed, len(tokens))
        rows = Rows(np.zeros_like(positions), positions, np.array(tokens[fed:]), positions)
        last = rows.take(np.array([len(rows) - 1]))
        logits = model.logits(model.hidden(rows, state)[-1:], last, Sampling())
        fed = len(tokens)
        tokens.append(int(logits[0].argmax()))
    chosen = score(batch=[tokens], prompt_lengths=[4]).logprobs[0]
    others = score(batch=[[*tokens[:-1], (tokens[-1] + 1) % 101]], prompt_lengths=[11]).logprobs[0]
    assert chosen.size == 8 and chosen[-1] > others[-1]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"batch": []}, "batch: expected at least one sequence"),
        ({"batch": [[1]], "prompt_lengths": [1]}, r"batch\[0\]: expected at least 2 tokens"),
        ({"batch": [[1, 101]], "prompt_lengths": [1]}, r"batch\[0\]\[1\]: token 101 is outside the vocabulary of 101"),
        ({"batch": [[0] * 300], "prompt_lengths": [1]}, "300 tokens exceed the model's 256"),
        ({"prompt_lengths": [10, 5, 64]}, r"prompt_lengths\[1\]: must be 1 to 4, got 5"),
        ({"prompt_lengths": [10]}, "prompt_lengths: expected 3, one per sequence"),
        ({"phase": "train"}, "phase: must be 'prefill' or 'decode'"),
        ({"page_size": 0}, "page_size: must be at least 1"),
        ({"chunk": 0}, "chunk: must be at least 1"),
        ({"block_tables": [np.array([0])]}, "block_tables: expected 3"),
        ({"block_tables": [np.array([0]), np.array([1]), np.array([2])]}, r"block_tables\[0\]: 2 pages needed, got 1"),
        ({"block_tables": [np.array([0, 1]), np.array([1]), np.arange(2, 7)]}, "a page is used twice or negative"),
        ({"rope_positions": [[0]]}, "rope_positions: expected one position per token"),
        ({"tensor_parallel": 3}, "tensor_parallel: 3 does not divide num_attention_heads"),
        ({"weights": {}}, r"weights: model.embed_tokens.weight \[101, 64\] is missing"),
        ({"observe": lambda *a: np.zeros(3, np.float32)}, r"observe: the replacement of embed_tokens must be float32"),
    ],
)
def test_bad_input(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(**settings_)


def test_bad_weights() -> None:
    transposed = {**WEIGHTS, "model.norm.weight": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=r"model.norm.weight must have shape \[64\], got \[3\]"):
        score(weights=transposed)
    with pytest.raises(TypeError, match=r"weights\[model.norm.weight\]: expected dtype float32, got float16"):
        score(weights={**WEIGHTS, "model.norm.weight": np.zeros(64, np.float16)})
