"""Cases that run, of every call of the catalogue, exactly the code that a user of that shape launches.

Compile-time constants, block sizes, warps and what the compiler knows of arguments are those of the catalogue
(`fastpath.machine_code.catalogue`); rows and features that are run-time numbers are few, and ragged where they may be.
Which code of the catalogue ran is counted by its hash: `fastpath.emulation.report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from fastpath.attention.kv_cache import write_cache
from fastpath.backend import DTYPES, EMULATED
from fastpath.conformance.frame import Case, Comparison, compare, to_device
from fastpath.conformance.inputs import values
from fastpath.machine_code.call import EPSILON, FEATURES, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, contract, gradient
from fastpath.machine_code.code import as_if_vast
from fastpath.products.linear import bias_gradient
from fastpath.rows.embedding import embedding, embedding_backward
from fastpath.rows.qk_norm import merge_heads, qk_norm, qk_norm_backward
from fastpath.rows.qk_norm_rope import packed_qk_norm_rope, qk_norm_rope
from fastpath.rows.rms_norm import rms_norm_backward
from fastpath.rows.rope import rope, rope_backward, rope_table
from fastpath.rows.swiglu import swiglu, swiglu_backward
from reference import gradients
from reference import operators as reference
from reference.checks import Float32Array

THETA, POSITIONS = 1e6, 1024
#: Rows: a multiple of 16, which the compiler sees, and of nothing else that a tile could be.
TOKENS = 48
Check = Callable[[str], Iterator[Comparison]]


def cases() -> Iterator[Case]:
    """Only where code is emulated: on a device the shapes of the catalogue are run as they are."""
    if not EMULATED:
        return
    checks: dict[str, Check] = {
        "rms_norm": _rms_norm, "qk_norm": _qk_norm, "linear": _bias, "rope": _rope, "qk_norm_rope": _qk_norm_rope,
        "packed_qk_norm_rope": _packed, "embedding": _embedding, "kv_cache": _kv_cache, "swiglu": _swiglu,
    }  # fmt: skip
    for operator, check in checks.items():
        for dtype in DTYPES:
            yield Case(f"{operator}/as-launched/{dtype}", partial(check, dtype))


def _on(dtype: str, *arrays: Float32Array) -> list[torch.Tensor]:
    return [to_device(array, DTYPES[dtype]) for array in arrays]


def _rms_norm(dtype: str) -> Iterator[Comparison]:
    own, weight = gradient("rms_norm", dtype), values("normal", (HIDDEN,), dtype, 4)
    x, residual, dy = (values("normal", (TOKENS, HIDDEN), dtype, seed) for seed in (1, 2, 3))
    dy_on, x_on, weight_on, residual_on = _on(dtype, dy, x, weight, residual)
    for name, extra, extra_on in (("", None, None), (" with residual", residual, residual_on)):
        batch = None if extra is None else extra[None]
        want = gradients.rms_norm_backward(dy[None], x[None], weight, EPSILON, own, None, batch)
        got = rms_norm_backward(dy_on, x_on, weight_on, EPSILON, own, extra_on)
        yield compare(f"gradient of x{name}", got.x, want.x[0])
        yield compare(f"gradient of weight{name}", got.weight, want.weight)


def _qk_norm(dtype: str) -> Iterator[Comparison]:
    norm, own = contract("qk_norm", dtype), gradient("qk_norm", dtype)
    x, dy = (values("normal", (TOKENS, HEADS, HEAD_DIM), dtype, seed) for seed in (1, 2))
    weight = values("normal", (HEAD_DIM,), dtype, 3)
    dy_on, x_on, weight_on = _on(dtype, dy, x, weight)
    yield compare("output", qk_norm(x_on, weight_on, EPSILON, norm), reference.qk_norm(x, weight, EPSILON, norm))
    batch = [np.ascontiguousarray(part.reshape(-1, 2, HEADS, HEAD_DIM).swapaxes(0, 1)) for part in (dy, x)]
    want = gradients.qk_norm_backward(batch[0], batch[1], weight, EPSILON, own)
    got = qk_norm_backward(dy_on, x_on, weight_on, EPSILON, own, sequences=2)
    yield compare("gradient of x", got.x, want.x.swapaxes(0, 1).reshape(x.shape).copy())
    yield compare("gradient of weight", merge_heads(got.weight, own), gradients.merge_heads(want.weight, own))


def _bias(dtype: str) -> Iterator[Comparison]:
    own, grad = gradient("linear", dtype), values("cancelling", (2 * TOKENS, HIDDEN), dtype, 1)
    want = gradients.bias_gradient(np.ascontiguousarray(grad.reshape(-1, 2, HIDDEN).swapaxes(0, 1)), own.partition.rows)
    yield compare("gradient of bias", bias_gradient(_on(dtype, grad)[0], own, sequences=2), want)


def _rotations(dtype: str) -> Iterator[tuple[str, Any, Any, torch.Tensor, Any]]:
    """Name, contract, the table on the device, positions there and the reference's rows, of both pairings."""
    positions = np.random.default_rng(5).integers(0, POSITIONS, TOKENS)
    for pairing in ("halves", "interleaved"):
        own = contract("rope", dtype).override("domain.pairing", pairing)
        table = rope_table(POSITIONS, HEAD_DIM, THETA, own, "cpu")
        yield pairing, own, table, to_device(positions), reference.rope_table(positions, HEAD_DIM, THETA, own)


def _rope(dtype: str) -> Iterator[Comparison]:
    x = values("normal", (TOKENS, HEADS, HEAD_DIM), dtype, 1)
    (on,) = _on(dtype, x)
    for pairing, own, table, positions, rows in _rotations(dtype):
        yield compare(pairing, rope(on, positions, table, own), reference.rope(x, rows, own))
        if pairing == "halves":
            back = gradient("rope", dtype)
            got = rope_backward(on, positions, table, back)
            yield compare("gradient", got, gradients.rope_backward(x, rows, back))


def _qk_norm_rope(dtype: str) -> Iterator[Comparison]:
    x, weight = values("normal", (TOKENS, HEADS, HEAD_DIM), dtype, 1), values("normal", (HEAD_DIM,), dtype, 2)
    norm, (x_on, weight_on) = contract("qk_norm", dtype), _on(dtype, x, weight)
    for pairing, own, table, positions, rows in _rotations(dtype):
        expected = reference.rope(reference.qk_norm(x, weight, EPSILON, norm), rows, own)
        yield compare(pairing, qk_norm_rope(x_on, weight_on, positions, table, EPSILON, norm, own), expected)


def _packed(dtype: str) -> Iterator[Comparison]:
    rotated = HEADS + KV_HEADS
    qkv = values("normal", (TOKENS, (rotated + KV_HEADS) * HEAD_DIM), dtype, 1)
    weights = [values("normal", (HEAD_DIM,), dtype, seed) for seed in (2, 3)]
    norm, (qkv_on, q_on, k_on) = contract("qk_norm", dtype), _on(dtype, qkv, *weights)
    x = np.ascontiguousarray(qkv[:, : rotated * HEAD_DIM]).reshape(TOKENS, rotated, HEAD_DIM)
    parts = (np.ascontiguousarray(x[:, :HEADS]), np.ascontiguousarray(x[:, HEADS:]))
    _, own, table, positions, rows = next(_rotations(dtype))
    expected = [
        reference.rope(reference.qk_norm(part, weight, EPSILON, norm), rows, own)
        for part, weight in zip(parts, weights, strict=True)
    ]
    got = packed_qk_norm_rope(qkv_on, q_on, k_on, positions, table, HEADS, KV_HEADS, EPSILON, norm, own)
    yield compare("queries and keys", got, np.concatenate(expected, 1))


def _embedding(dtype: str) -> Iterator[Comparison]:
    own, back, rows = contract("embedding", dtype), gradient("embedding", dtype), 96
    table, dy = values("normal", (rows, HIDDEN), dtype, 1), values("cancelling", (TOKENS, HIDDEN), dtype, 2)
    ids = np.random.default_rng(3).integers(0, rows, TOKENS) // 2  # tokens that occur more than once
    on, ids_on = _on(dtype, table, dy), to_device(ids)
    with as_if_vast({(torch.float32, (rows, HIDDEN))}):
        yield compare("rows", embedding(ids_on, on[0], own), reference.embedding(ids, table, own))
        got = embedding_backward(on[1], ids_on, rows, back)
    yield compare("gradient", got, gradients.embedding_backward(dy[None], ids[None], rows, back, None))


def _kv_cache(dtype: str) -> Iterator[Comparison]:
    own, page = contract("kv_cache", dtype), 16
    cache = reference.empty_cache(8, page, KV_HEADS, HEAD_DIM)
    packed = values("normal", (TOKENS, HEADS, HEAD_DIM), dtype, 1)
    keys = np.ascontiguousarray(packed[:, :KV_HEADS])
    slots = np.random.default_rng(2).permutation(8 * page)[:TOKENS]
    on = _on(dtype, packed, cache.keys, cache.values)
    reference.write_cache(cache, slots, keys, keys, own)
    write_cache(on[0][:, :KV_HEADS], on[0][:, :KV_HEADS], to_device(slots), on[1], on[2], own)
    yield compare("keys", on[1], cache.keys)
    yield compare("values", on[2], cache.values)


def _swiglu(dtype: str) -> Iterator[Comparison]:
    own, back, tokens = contract("swiglu", dtype), gradient("swiglu", dtype), 5
    gate, up, dy = (values("normal", (tokens, FEATURES), dtype, seed) for seed in (1, 2, 3))
    packed, dy_on = _on(dtype, np.concatenate([gate * np.float32(4), up], 1), dy)
    halves = packed[:, :FEATURES], packed[:, FEATURES:]
    yield compare("output", swiglu(*halves, own), reference.swiglu(gate * np.float32(4), up, own))
    got, want = swiglu_backward(dy_on, *halves, back), gradients.swiglu_backward(dy, gate * np.float32(4), up, back)
    yield compare("gradient of gate", got[0], want[0])
    yield compare("gradient of up", got[1], want[1])


__all__ = ["cases"]
