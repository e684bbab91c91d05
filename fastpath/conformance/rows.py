"""Cases of the row kernels: norms, RoPE, SwiGLU, residual add, embedding, cache write; forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from fastpath.attention.kv_cache import write_cache
from fastpath.backend import DTYPES, EMULATED, INTERPRETED
from fastpath.conformance.frame import Case, Comparison, compare, device, to_device
from fastpath.conformance.inputs import KINDS, values
from fastpath.rows.embedding import embedding, embedding_backward
from fastpath.rows.qk_norm import merge_heads, qk_norm, qk_norm_backward
from fastpath.rows.qk_norm_rope import qk_norm_rope
from fastpath.rows.residual_add import residual_add
from fastpath.rows.rms_norm import rms_norm, rms_norm_backward
from fastpath.rows.rope import rope, rope_backward, rope_table
from fastpath.rows.swiglu import swiglu, swiglu_backward
from reference import gradients
from reference import operators as reference
from reference.checks import Float32Array
from reference.contract.base import Contract
from reference.contract.profiles import profile

EPSILON, THETA, POSITIONS = 1e-6, 1e6, 256
#: Tokens and hidden sizes; in the interpreter, few.
SHAPES: tuple[tuple[int, int], ...] = (
    ((3, 1), (2, 100), (5, 256), (3, 300))
    if INTERPRETED
    else ((1, 1), (7, 100), (64, 4096), (3, 5120), (2, 8192), (33, 12288), (70, 96))
    if EMULATED
    else ((1, 1), (7, 100), (1, 4096), (64, 1024), (130, 4096), (33, 5120), (9, 8192), (2, 12288), (8192, 96))
)
#: Tokens and heads of per-head operators.
HEADS = ((3, 2),) if INTERPRETED else ((1, 1), (7, 5), (64, 8)) if EMULATED else ((1, 1), (7, 5), (64, 8), (130, 32))


def cases() -> Iterator[Case]:
    """Every operator, dtype and kind of values."""
    operators: dict[str, Callable[[str, str], Iterator[Comparison]]] = {
        "rms_norm": _rms_norm,
        "qk_norm": _qk_norm,
        "rope": _rope,
        "qk_norm_rope": _qk_norm_rope,
        "swiglu": _swiglu,
        "residual_add": _residual_add,
        "embedding": _embedding,
        "kv_cache": _kv_cache,
    }
    yield Case("swiglu/every-gate", _every_gate)
    for operator, check in operators.items():
        for dtype in DTYPES:
            for kind in KINDS:
                yield Case(f"{operator}/{dtype}/{kind}", partial(check, dtype, kind))


def _contract(operator: str, dtype: str) -> Any:
    return profile("strict-v1").contract(operator, dtype)


def gradient_contract(contract: Contract) -> Any:
    """The contract of an operator's gradient."""
    return gradients.gradient_contract(contract)


def _sequences(rows: Float32Array, count: int) -> Float32Array:
    """Rows [tokens * sequences, ...], tokens of the sequences side by side, as [sequences, tokens, ...]."""
    return np.ascontiguousarray(rows.reshape(-1, count, *rows.shape[1:]).swapaxes(0, 1))


def _side_by_side(x: Float32Array) -> Float32Array:
    """The inverse of `_sequences`."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(-1, *x.shape[2:])


def _rms_norm(dtype: str, kind: str) -> Iterator[Comparison]:
    contract, storage = _contract("rms_norm", dtype), DTYPES[dtype]
    for seed, shape in enumerate(SHAPES):
        x, residual, dy = (values(kind, shape, dtype, seed + i) for i in (0, 100, 200))
        weight = values("normal", shape[1:], dtype, seed + 300)
        on = [to_device(part, storage) for part in (x, residual, dy, weight)]
        plain, expected = rms_norm(on[0], on[3], EPSILON, contract), reference.rms_norm(x, weight, EPSILON, contract)
        yield compare(f"{shape}", plain.output, expected.output)
        added = rms_norm(on[0], on[3], EPSILON, contract, on[1])
        total = reference.rms_norm(x, weight, EPSILON, contract, residual)
        yield compare(f"{shape} with residual", added.output, total.output)
        assert added.residual is not None
        yield compare(f"{shape} residual", added.residual, total.residual)
        for name, extra, extra_on in (("", None, None), (" with residual", residual, on[1])):
            own, sums = gradient_contract(contract), values("normal", shape[1:], "float32", seed + 400)
            count = 2 - shape[0] % 2  # sequences, their tokens side by side
            batch = [_sequences(part, count) for part in (dy, x)]
            extra_batch = None if extra is None else _sequences(extra, count)
            want = gradients.rms_norm_backward(batch[0], batch[1], weight, EPSILON, own, sums, extra_batch)
            got = rms_norm_backward(
                *(on[2], on[0], on[3], EPSILON, own, extra_on), sequences=count, sums=to_device(sums.copy())
            )
            yield compare(f"{shape} gradient of x{name}", got.x, _side_by_side(want.x))
            yield compare(f"{shape} gradient of weight{name}", got.weight, want.weight)


def _qk_norm(dtype: str, kind: str) -> Iterator[Comparison]:
    contract, storage = _contract("qk_norm", dtype), DTYPES[dtype]
    for seed, (tokens, heads) in enumerate(HEADS):
        for head_dim in (64, 128, 256):
            shape = (tokens, heads, head_dim)
            x, dy = (values(kind, shape, dtype, seed + i) for i in (0, 100))
            weight = values("normal", (head_dim,), dtype, seed + 200)
            x_on, dy_on, weight_on = (to_device(part, storage) for part in (x, dy, weight))
            expected = reference.qk_norm(x, weight, EPSILON, contract)
            yield compare(f"{shape}", qk_norm(x_on, weight_on, EPSILON, contract), expected)
            packed = torch.cat([x_on, dy_on], dim=1)
            yield compare(f"{shape} strided", qk_norm(packed[:, :heads], weight_on, EPSILON, contract), expected)
            own, count = gradient_contract(contract), 2 - tokens % 2
            batch = [_sequences(part, count) for part in (dy, x)]
            want = gradients.qk_norm_backward(batch[0], batch[1], weight, EPSILON, own)
            got = qk_norm_backward(dy_on, x_on, weight_on, EPSILON, own, sequences=count)
            yield compare(f"{shape} gradient of x", got.x, _side_by_side(want.x))
            yield compare(f"{shape} gradient of weight by head", got.weight, want.weight)
            merged = gradients.merge_heads(want.weight, own)
            yield compare(f"{shape} gradient of weight", merge_heads(got.weight, own), merged)


def _rope(dtype: str, kind: str) -> Iterator[Comparison]:
    for pairing in ("halves", "interleaved"):
        contract = _contract("rope", dtype).override("domain.pairing", pairing)
        for seed, (tokens, heads) in enumerate(HEADS):
            for head_dim in (64, 128, 256):
                x = values(kind, (tokens, heads, head_dim), dtype, seed)
                positions = np.random.default_rng(seed).integers(0, POSITIONS, tokens)
                table = rope_table(POSITIONS, head_dim, THETA, contract, device())
                rows = reference.rope_table(positions, head_dim, THETA, contract)
                x_on, positions_on = to_device(x, DTYPES[dtype]), to_device(positions)
                what = f"{x.shape} {pairing}"
                yield compare(what, rope(x_on, positions_on, table, contract), reference.rope(x, rows, contract))
                own = gradient_contract(contract)
                back = rope_backward(x_on, positions_on, table, own)
                yield compare(f"{what} gradient", back, gradients.rope_backward(x, rows, own))


def _qk_norm_rope(dtype: str, kind: str) -> Iterator[Comparison]:
    norm = _contract("qk_norm", dtype)
    for pairing in ("halves", "interleaved"):
        rotation = _contract("rope", dtype).override("domain.pairing", pairing)
        for seed, (tokens, heads) in enumerate(HEADS):
            for head_dim in (64, 128, 256):
                x, weight = (
                    values(kind, (tokens, heads, head_dim), dtype, seed),
                    values("normal", (head_dim,), dtype, 9),
                )
                positions = np.random.default_rng(seed).integers(0, POSITIONS, tokens)
                table = rope_table(POSITIONS, head_dim, THETA, rotation, device())
                rows = reference.rope_table(positions, head_dim, THETA, rotation)
                expected = reference.rope(reference.qk_norm(x, weight, EPSILON, norm), rows, rotation)
                x_on, weight_on = (to_device(part, DTYPES[dtype]) for part in (x, weight))
                packed = torch.cat([x_on, x_on], dim=1)
                for what, heads_on in (("", x_on), (" strided", packed[:, :heads])):
                    got = qk_norm_rope(heads_on, weight_on, to_device(positions), table, EPSILON, norm, rotation)
                    yield compare(f"{x.shape} {pairing}{what}", got, expected)


def _swiglu(dtype: str, kind: str) -> Iterator[Comparison]:
    contract, storage = _contract("swiglu", dtype), DTYPES[dtype]
    for seed, shape in enumerate(SHAPES):
        gate, up, dy = (values(kind, shape, dtype, seed + i) for i in (0, 100, 200))
        gate = gate * np.float32(8)  # past the exponential's overflow too
        packed, dy_on = to_device(np.concatenate([gate, up], axis=1), storage), to_device(dy, storage)
        gate_on, up_on = packed[:, : shape[1]], packed[:, shape[1] :]
        yield compare(f"{shape}", swiglu(gate_on, up_on, contract), reference.swiglu(gate, up, contract))
        own = gradient_contract(contract)
        got, want = swiglu_backward(dy_on, gate_on, up_on, own), gradients.swiglu_backward(dy, gate, up, own)
        yield compare(f"{shape} gradient of gate", got[0], want[0])
        yield compare(f"{shape} gradient of up", got[1], want[1])


def _every_gate() -> Iterator[Comparison]:
    """All 65,536 gates of bfloat16, and float32 gates around the ends of the exponential's range."""
    every = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32).reshape(64, 1024)
    ends = (88.72284, -88.72284, 80.0, -80.0, 104.0, 16.6)
    near = np.concatenate([np.float32(x).view(np.int32) + np.arange(-2048, 2048) for x in ends])
    near = near.astype(np.int32).view(np.float32).reshape(-1, 1024)
    for dtype, gate in (("bfloat16", every), ("float32", every), ("float32", near)):
        contract, up = _contract("swiglu", dtype), np.ones_like(gate)
        got = swiglu(to_device(gate, DTYPES[dtype]), to_device(up, DTYPES[dtype]), contract)
        yield compare(f"{gate.size} gates, {dtype}", got, reference.swiglu(gate, up, contract))
        own, on = gradient_contract(contract), [to_device(part, DTYPES[dtype]) for part in (up, gate, up)]
        for name, back, want in zip(
            ("gate", "up"),
            swiglu_backward(on[0], on[1], on[2], own),
            gradients.swiglu_backward(up, gate, up, own),
            strict=True,
        ):
            yield compare(f"{gate.size} gates, {dtype}, gradient of {name}", back, want)


def _residual_add(dtype: str, kind: str) -> Iterator[Comparison]:
    contract, storage = _contract("residual_add", dtype), DTYPES[dtype]
    for seed, shape in enumerate(SHAPES):
        x, residual = (values(kind, shape, dtype, seed + i) for i in (0, 100))
        got = residual_add(to_device(x, storage), to_device(residual, storage), contract)
        yield compare(f"{shape}", got, reference.residual_add(x, residual, contract))


def _embedding(dtype: str, kind: str) -> Iterator[Comparison]:
    contract, storage = _contract("embedding", dtype), DTYPES[dtype]
    for seed, (tokens, hidden) in enumerate(SHAPES):
        table, dy = values(kind, (97, hidden), dtype, seed), values(kind, (tokens, hidden), dtype, seed + 100)
        ids = np.random.default_rng(seed).integers(0, 97, tokens) // (1 + seed % 3)
        ids_on = to_device(ids)
        got = embedding(ids_on, to_device(table, storage), contract)
        yield compare(f"{dy.shape}", got, reference.embedding(ids, table, contract))
        own, sums = gradient_contract(contract), values("normal", (97, hidden), "float32", seed + 200)
        back = embedding_backward(to_device(dy, storage), ids_on, 97, own, sums=to_device(sums.copy()))
        yield compare(f"{dy.shape} gradient", back, gradients.embedding_backward(dy[None], ids[None], 97, own, sums))


def _kv_cache(dtype: str, kind: str) -> Iterator[Comparison]:
    contract, storage = _contract("kv_cache", dtype), DTYPES[dtype]
    for seed, (tokens, heads) in enumerate(HEADS):
        for page in (16, 48, 256):
            cache = reference.empty_cache(tokens // page + 2, page, heads, 64)
            keys, others = (values(kind, (tokens, heads, 64), dtype, seed + i) for i in (0, 100))
            slots = np.random.default_rng(seed).permutation(cache.keys.shape[0] * page)[:tokens]
            on = [to_device(part, storage) for part in (cache.keys, cache.values, keys, others)]
            reference.write_cache(cache, slots, keys, others, contract)
            write_cache(on[2], on[3], to_device(slots), on[0], on[1], contract)
            yield compare(f"{keys.shape} page {page} keys", on[0], cache.keys)
            yield compare(f"{keys.shape} page {page} values", on[1], cache.values)
