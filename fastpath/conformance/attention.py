"""Cases of attention: decode, chunks, prefill and packed sequences, with and without pages, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastpath.attention.attention import Packed, Pages, attention
from fastpath.attention.attention_backward import attention_backward
from fastpath.backend import DTYPES, EMULATED, INTERPRETED
from fastpath.conformance.frame import Case, Comparison, compare, to_device
from fastpath.conformance.inputs import KINDS, values
from reference import gradients
from reference import operators as reference
from reference.checks import Float32Array
from reference.contract.profiles import profile
from reference.operators import AttentionContract
from reference.operators.attention import attention_result

#: Arithmetic profile and model dtype.
FORMS = (
    ("hopper-k16", "bfloat16"),
    ("mfma-cdna3-g8", "bfloat16"),
    ("fma32-seq", "bfloat16"),
    ("fma32-seq", "float32"),
)


@dataclass(frozen=True)
class Shape:
    """Sequences, heads and pages of one batch."""

    #: Queries, and keys, of each sequence.
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    #: Tokens of a page; 0 packs the sequences.
    page: int = 0
    mask: str = "causal"
    kind: str = "normal"


_SMALL = (
    Shape((1, 1), (70, 130), 2, 2, 16, 16),
    Shape((5, 9), (5, 70), 1, 3, 16),
    Shape((20,), (70,), 1, 1, 16, 48),
    Shape((3, 4), (66, 64), 1, 1, 16, 64, "full"),
)
_DECODE = tuple(
    Shape((1, 1, 1), (1, 65, 200), 2, group, head_dim, page)
    for group, head_dim, page in (
        (1, 64, 16),
        (2, 128, 48),
        (4, 128, 64),
        (8, 128, 256),
        (5, 256, 16),
        (8, 64, 128),
        (16, 128, 100),
        (2, 256, 64),
    )
)
_PREFILL = (
    Shape((130,), (130,), 1, 2, 128),
    Shape((33, 64), (100, 200), 2, 4, 128, 16),
    Shape((1, 70, 3), (77, 70, 131), 1, 8, 64, 48),
    Shape((17, 100), (90, 100), 2, 1, 256, 256),
    Shape((64, 1, 129), (64, 1, 129), 1, 1, 64),
    Shape((50, 7), (120, 7), 1, 3, 128, 32, "full"),
    Shape((200,), (264,), 1, 1, 128, 64),
)
#: Kinds of values beyond the normal one, each with a decode and a prefill.
_KINDS = tuple(
    replace(shape, kind=kind)
    for kind in KINDS
    if kind != "normal"
    for shape in (Shape((1, 1), (70, 130), 2, 2, 64, 16), Shape((70, 9), (70, 150), 1, 2, 64, 48))
)


def cases() -> Iterator[Case]:
    """Every form with every shape and kind; on a device also schedules against each other at length."""
    if EMULATED:  # has cases of its own
        return
    for unit, dtype in FORMS:
        for shape in _shapes(unit):
            name = f"attention/{unit}/{dtype}/{shape.kind}/{shape.queries}-{shape.keys}-{shape.kv_heads}x{shape.group}"
            name += f"-{shape.head_dim}-{f'page {shape.page}' if shape.page else 'packed'}-{shape.mask}"
            yield Case(name.replace(" ", ""), partial(_against_reference, unit, dtype, shape), unit)
        yield Case(f"attention/{unit}/{dtype}/gradients", partial(_gradients, unit, dtype), unit)
        if not INTERPRETED:
            yield Case(f"attention/{unit}/{dtype}/schedules", partial(_schedules, unit, dtype), unit)


def _shapes(unit: str) -> tuple[Shape, ...]:
    """Shapes for this target: few in the interpreter; fewer for plain FMA, whose code takes long to compile."""
    if INTERPRETED:
        return (*_SMALL, *(replace(_SMALL[2], kind=kind) for kind in KINDS[1:]))
    some = (_DECODE[0], _DECODE[3], _PREFILL[1], _PREFILL[4]) if unit == "fma32-seq" else (*_DECODE, *_PREFILL)
    return (*some, *_KINDS)


def attention_contract(unit: str, dtype: str, mask: str = "causal") -> AttentionContract:
    """The strict contract under a mask."""
    contract = profile(f"strict-v1/{unit}").contract("attention", dtype).override("domain.mask", mask)
    assert isinstance(contract, AttentionContract)
    return contract


def attention_inputs(shape: Shape, dtype: str, seed: int) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Queries, keys and values of all sequences, end to end. Infinities and NaN: a few, in values that only later
    queries see, so that a leak to earlier ones shows."""
    tokens, keys = sum(shape.queries), sum(shape.keys)
    sparse = shape.kind in ("infinity", "nan")
    q = values("normal", (tokens, shape.kv_heads * shape.group, shape.head_dim), dtype, seed)
    k = values("normal" if sparse else shape.kind, (keys, shape.kv_heads, shape.head_dim), dtype, seed + 1)
    v = values("normal" if sparse else shape.kind, (keys, shape.kv_heads, shape.head_dim), dtype, seed + 2)
    if sparse:
        rng = np.random.default_rng(seed)
        special = [np.nan] if shape.kind == "nan" else [np.inf, -np.inf]
        for array, count in ((v, 12), (k, 1)):
            places = tuple(
                rng.integers(size // 2 if axis == 0 else 0, size, count) for axis, size in enumerate(array.shape)
            )
            array[places] = rng.choice(special, count)
    return q, k, v


def starts_of(counts: tuple[int, ...]) -> NDArray[np.int32]:
    """Where each sequence starts, and the end."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def paged(k: Float32Array, v: Float32Array, counts: tuple[int, ...], page: int, dtype: str, seed: int) -> Pages:
    """Keys and values in pages at random places; NaN in every slot without a token."""
    rng, blocks = np.random.default_rng(seed), [-(-count // page) for count in counts]
    places = rng.permutation(sum(blocks) + 3)
    pool = np.full((2, len(places), page, *k.shape[1:]), np.nan, np.float32)
    tables = np.zeros((len(counts), max(blocks) + 1), np.int32)
    free = iter(places)
    for sequence, (start, count) in enumerate(zip(starts_of(counts), counts, strict=False)):
        for block in range(blocks[sequence]):
            here = tables[sequence, block] = next(free)
            rows = slice(start + block * page, start + min((block + 1) * page, count))
            pool[0, here, : rows.stop - rows.start], pool[1, here, : rows.stop - rows.start] = k[rows], v[rows]
    keys, others = (to_device(part, DTYPES[dtype]) for part in pool)
    return Pages(keys, others, to_device(tables), to_device(np.array(counts, np.int32)))


def _against_reference(unit: str, dtype: str, shape: Shape) -> Iterator[Comparison]:
    contract, storage = attention_contract(unit, dtype, shape.mask), DTYPES[dtype]
    q, k, v = attention_inputs(shape, dtype, 7)
    expected = []
    for first, count, start, keys in zip(
        starts_of(shape.queries), shape.queries, starts_of(shape.keys), shape.keys, strict=False
    ):
        dense = reference.DenseKeyValues(k[start : start + keys], v[start : start + keys])
        positions = np.arange(keys - count, keys)
        expected.append(reference.attention(q[first : first + count], positions, dense, contract))
    if shape.page:
        kv: Pages | Packed = paged(k, v, shape.keys, shape.page, dtype, 11)
    else:
        kv = Packed(to_device(k, storage), to_device(v, storage), to_device(starts_of(shape.keys)))
    got = attention(to_device(q, storage), to_device(starts_of(shape.queries)), max(shape.queries), kv, contract)
    yield compare("output", got.output, np.concatenate(expected))
    if max(shape.queries) == 1:  # what the backward pass needs comes from the single pass alone
        kept = attention(to_device(q, storage), to_device(starts_of(shape.queries)), 1, kv, contract, save=True)
        yield compare("output of the single pass", kept.output, np.concatenate(expected))


def _schedules(unit: str, dtype: str) -> Iterator[Comparison]:
    """The same tokens as one packed prefill, as chunks through pages, and as decode steps: equal bits."""
    contract, storage, length, heads, kv_heads = attention_contract(unit, dtype), DTYPES[dtype], 1500, 16, 4
    q, k, v = (values("normal", (length, n, 128), dtype, i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    q_on = to_device(q, storage)
    kv = Packed(to_device(k, storage), to_device(v, storage), to_device(starts_of((length,))))
    whole = attention(q_on, to_device(starts_of((length,))), length, kv, contract).output
    for page, chunk in ((48, 16),) if unit == "fma32-seq" else ((16, 1), (64, 3), (48, 16), (256, 700)):
        pages = paged(k, v, (length,), page, dtype, page)
        for end in (chunk, 64, 65, 128, 700, 1500):
            if end < chunk:
                continue
            now = replace(pages, lengths=torch.full_like(pages.lengths, end))
            part = attention(q_on[end - chunk : end], to_device(starts_of((chunk,))), chunk, now, contract).output
            yield compare(f"{chunk} tokens before {end} through pages of {page}", part, whole[end - chunk : end])
    halves = attention(
        q_on, to_device(starts_of((1000, 500))), 1000, replace(kv, starts=to_device(starts_of((1000, 500)))), contract
    )
    yield compare("first of two packed sequences", halves.output[:1000], whole[:1000])


def of_gradient(contract: AttentionContract) -> Any:
    """The contract of the gradients of attention under ``contract``."""
    return gradients.gradient_contract(contract)


def expected_gradients(
    dy: Float32Array,
    q: Float32Array,
    k: Float32Array,
    v: Float32Array,
    starts: NDArray[np.int32],
    key_starts: NDArray[np.int32],
    contract: AttentionContract,
) -> list[Any]:
    """The reference's gradients of each packed sequence."""
    own = of_gradient(contract)
    parts = []
    for a, b, c, d in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        dense = reference.DenseKeyValues(k[c:d], v[c:d])
        forward = attention_result(q[a:b], np.arange(d - c - (b - a), d - c), dense, contract)
        parts.append(gradients.attention_backward(dy[a:b], q[a:b], k[c:d], v[c:d], forward, own))
    return parts


def _gradients(unit: str, dtype: str) -> Iterator[Comparison]:
    """Gradients of packed sequences, some with keys before the first query."""
    if INTERPRETED:
        shapes = [Shape((5, 9), (5, 70), 1, 2, 16)]
    else:
        shapes = [
            Shape((100, 33), (100, 150), 2, 4, 64),
            Shape((70, 1, 130), (70, 65, 130), 1, 2, 128),
            Shape((40,), (40,), 1, 8, 256),
            Shape((50, 64), (80, 64), 1, 3, 128, mask="full"),
        ]
    for seed, shape in enumerate(shapes[: 2 if unit == "fma32-seq" else None]):
        contract, storage = attention_contract(unit, dtype, shape.mask), DTYPES[dtype]
        q, k, v = attention_inputs(shape, dtype, seed)
        dy = values("normal", q.shape, dtype, seed + 50)
        starts, key_starts = starts_of(shape.queries), starts_of(shape.keys)
        parts = expected_gradients(dy, q, k, v, starts, key_starts, contract)
        kv = Packed(to_device(k, storage), to_device(v, storage), to_device(key_starts))
        q_on, starts_on, most = to_device(q, storage), to_device(starts), max(shape.queries)
        result = attention(q_on, starts_on, most, kv, contract, save=True)
        dy_on = to_device(dy, storage)
        got = attention_backward(dy_on, q_on, starts_on, most, kv, max(shape.keys), result, of_gradient(contract))
        for index, name in enumerate("qkv"):
            yield compare(f"{shape} gradient of {name}", got[index], np.concatenate([part[index] for part in parts]))
