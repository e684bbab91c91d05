"""Calls that reach every kernel and schedule of the operators: what `examine` plans, compiles and checks.

A call runs an operator on tensors without data. Shapes are those of Qwen3-8B (hidden 4096, 32 query heads, 8 KV heads,
head_dim 128, 12288 features), so that code is what a user launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fastpath.attention.attention import AttentionResult, Packed, Pages, attention
from fastpath.attention.attention_backward import attention_backward
from fastpath.attention.kv_cache import write_cache
from fastpath.backend import DTYPES
from fastpath.machine_code.call import (
    EPSILON,
    FEATURES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCABULARY,
    Call,
    contract,
    empty,
    gradient,
)
from fastpath.machine_code.catalogue_experts import expert_calls
from fastpath.machine_code.catalogue_products import product_calls
from fastpath.products.linear import bias_gradient
from fastpath.rows.embedding import embedding, embedding_backward
from fastpath.rows.qk_norm import merge_heads, qk_norm, qk_norm_backward
from fastpath.rows.qk_norm_rope import packed_qk_norm_rope, qk_norm_rope
from fastpath.rows.residual_add import residual_add
from fastpath.rows.rms_norm import rms_norm, rms_norm_backward
from fastpath.rows.rope import RopeTable, rope, rope_backward
from fastpath.rows.swiglu import swiglu, swiglu_backward


def calls() -> list[Call]:
    """Every call, in the order of the report."""
    return [*_row_calls(), *_attention_calls(), *product_calls(), *expert_calls()]


def _row_calls() -> Iterator[Call]:
    for name, dtype in DTYPES.items():
        yield from _norm_calls(name, dtype)
        yield from _elementwise_calls(name, dtype)


def _norm_calls(name: str, dtype: torch.dtype) -> Iterator[Call]:
    norm, heads_norm = contract("rms_norm", name), contract("qk_norm", name)
    weight, head_weight = empty(HIDDEN, dtype=dtype), empty(HEAD_DIM, dtype=dtype)
    x, heads = empty(64, HIDDEN, dtype=dtype), empty(64, HEADS, HEAD_DIM, dtype=dtype)
    yield Call(f"rms_norm/{name}", lambda: rms_norm(x, weight, EPSILON, norm))
    yield Call(f"rms_norm/{name}/residual", lambda: rms_norm(x, weight, EPSILON, norm, x))
    back, heads_back = gradient("rms_norm", name), gradient("qk_norm", name)
    yield Call(f"rms_norm/{name}/backward", lambda: rms_norm_backward(x, x, weight, EPSILON, back))
    yield Call(f"rms_norm/{name}/residual-backward", lambda: rms_norm_backward(x, x, weight, EPSILON, back, x))
    yield Call(f"qk_norm/{name}", lambda: qk_norm(heads, head_weight, EPSILON, heads_norm))
    run = partial(_head_norm_gradient, heads, head_weight, heads_back)
    yield Call(f"qk_norm/{name}/backward", run)
    yield Call(f"linear/{name}/bias-gradient", lambda: bias_gradient(x, gradient("linear", name), sequences=2))


def _head_norm_gradient(x: torch.Tensor, weight: torch.Tensor, own: Any) -> torch.Tensor:
    return merge_heads(qk_norm_backward(x, x, weight, EPSILON, own, sequences=2).weight, own)


def _elementwise_calls(name: str, dtype: torch.dtype) -> Iterator[Call]:
    x, heads, ids = (
        empty(64, HIDDEN, dtype=dtype),
        empty(64, HEADS, HEAD_DIM, dtype=dtype),
        empty(64, dtype=torch.int64),
    )
    gate_up = empty(64, 2 * FEATURES, dtype=dtype)
    gate, up = gate_up[:, :FEATURES], gate_up[:, FEATURES:]
    table = RopeTable(*(empty(1024, HEAD_DIM // 2, dtype=torch.float32) for _ in range(2)))
    interleaved = contract("rope", name).override("domain.pairing", "interleaved")
    keys, cache = heads[:, :KV_HEADS], empty(128, 16, KV_HEADS, HEAD_DIM, dtype=dtype)
    weights, grads = empty(VOCABULARY, HIDDEN, dtype=dtype), empty(64, FEATURES, dtype=dtype)
    yield Call(f"swiglu/{name}", lambda: swiglu(gate, up, contract("swiglu", name)))
    yield Call(f"swiglu/{name}/backward", lambda: swiglu_backward(grads, gate, up, gradient("swiglu", name)))
    yield Call(f"rope/{name}", lambda: rope(heads, ids, table, contract("rope", name)))
    yield Call(f"rope/{name}/interleaved", lambda: rope(heads, ids, table, interleaved))
    head_weight, norm = empty(HEAD_DIM, dtype=dtype), contract("qk_norm", name)
    for rotation in (contract("rope", name), interleaved):
        label = f"qk_norm_rope/{name}/{rotation.domain.pairing}"
        fused = partial(qk_norm_rope, heads, head_weight, ids, table, EPSILON, norm, rotation)
        yield Call(label, fused)
    yield Call(f"rope/{name}/backward", lambda: rope_backward(heads, ids, table, gradient("rope", name)))
    yield Call(f"residual_add/{name}", lambda: residual_add(x, x, contract("residual_add", name)))
    yield Call(f"embedding/{name}", lambda: embedding(ids, weights, contract("embedding", name)))
    yield Call(
        f"embedding/{name}/backward", lambda: embedding_backward(x, ids, VOCABULARY, gradient("embedding", name))
    )
    qkv = empty(64, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    packed = (qkv, head_weight, head_weight, ids, table, HEADS, KV_HEADS, EPSILON, norm, contract("rope", name))
    yield Call(f"packed_qk_norm_rope/{name}", partial(packed_qk_norm_rope, *packed))
    yield Call(f"kv_cache/{name}", lambda: write_cache(keys, keys, ids, cache, cache, contract("kv_cache", name)))


def _attention_calls() -> Iterator[Call]:
    for unit in ("mfma-cdna3-g8", "hopper-k16", "fma32-seq"):
        for head_dim in (64, 128, 256):
            yield from _attention_schedules(unit, "bfloat16", head_dim)
    yield from _attention_schedules("fma32-seq", "float32", HEAD_DIM)


def _attention_schedules(unit: str, name: str, head_dim: int) -> Iterator[Call]:
    of = contract("attention", name, unit)
    dtype = DTYPES[name]
    q, kv = empty(64, HEADS, head_dim, dtype=dtype), empty(64, KV_HEADS, head_dim, dtype=dtype)
    cache, lengths = empty(128, 16, KV_HEADS, head_dim, dtype=dtype), empty(4, dtype=torch.int32)
    starts, tables = empty(5, dtype=torch.int32), empty(4, 64, dtype=torch.int32)
    wide = empty(128, 64, KV_HEADS, head_dim, dtype=dtype)
    label = f"attention/{unit}/{name}/{head_dim}"

    def call(kind: str, most: int, keys: Pages | Packed, save: bool = False) -> Call:
        return Call(f"{label}/{kind}", lambda: attention(q, starts, most, keys, of, save=save), unit)

    many = Pages(cache, cache, empty(64, 64, dtype=torch.int32), empty(64, dtype=torch.int32))
    batch, ends = empty(64, HEADS, head_dim, dtype=dtype), empty(65, dtype=torch.int32)
    yield Call(f"{label}/decode-batch", lambda: attention(batch, ends, 1, many, of), unit)
    yield call("decode", 1, Pages(cache, cache, tables, lengths))
    yield call("decode-64", 1, Pages(wide, wide, tables, lengths))
    yield call("chunk", 16, Pages(cache, cache, tables, lengths))
    yield call("prefill", 4096, Pages(cache, cache, tables, lengths))
    yield call("packed", 4096, Packed(kv, kv, starts), save=True)
    packed, kept = Packed(kv, kv, starts), AttentionResult(q, *(empty(64, HEADS, dtype=torch.float32) for _ in "ml"))
    back = lambda: attention_backward(q, q, starts, 4096, packed, 4096, kept, gradient("attention", name, unit))  # noqa: E731
    if unit != "fma32-seq" or head_dim <= 128:
        yield Call(f"{label}/backward", back, unit)
