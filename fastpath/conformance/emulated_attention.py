"""Attention executed in emulation: what the catalogue launches, on few tokens, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fastpath.attention.attention import Packed, Pages, attention
from fastpath.attention.attention_backward import attention_backward
from fastpath.backend import DTYPES, EMULATED
from fastpath.conformance.attention import (
    Shape,
    attention_contract,
    attention_inputs,
    expected_gradients,
    of_gradient,
    paged,
    starts_of,
)
from fastpath.conformance.frame import Case, Comparison, compare, to_device
from fastpath.conformance.inputs import values
from reference import operators as reference

#: unit, dtype and head sizes, as in the catalogue.
FORMS = (
    ("mfma-cdna3-g8", "bfloat16", (64, 128, 256)),
    ("fma32-seq", "bfloat16", (64, 128, 256)),
    ("fma32-seq", "float32", (128,)),
)
#: Pages of a block table: 1024 keys of 16, so that decode spreads its keys over programs.
COLUMNS = 64
#: name -> most queries of a sequence (which chooses the schedule), queries, keys, page.
USES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], int]] = {
    "decode": (1, (1, 1, 1, 1), (1, 65, 200, 130), 16),
    "decode-64": (1, (1, 1, 1, 1), (64, 1, 129, 70), 64),
    "decode-batch": (1, (1,) * 64, tuple(1 + 3 * (i % 25) for i in range(64)), 16),
    "chunk": (16, (16, 3, 1, 9), (16, 70, 130, 77), 16),
    "prefill": (4096, (33, 1, 70, 5), (100, 64, 70, 200), 16),
    "packed": (4096, (33, 1, 70, 5), (100, 64, 70, 70), 0),
}
#: Of Qwen3, as in the catalogue: code is compiled for a number of KV heads. Other kinds of values run on one.
GROUP = 4
KV_HEADS = 8


def cases() -> Iterator[Case]:
    """Only where code is emulated."""
    if EMULATED:
        for unit, dtype, head_dims in FORMS:
            for head_dim in head_dims:
                for use in USES:
                    name = f"attention/{unit}/{dtype}/{head_dim}/{use}"
                    yield Case(name, partial(_use, unit, dtype, head_dim, use), unit)
                if unit != "fma32-seq" or head_dim <= 128:
                    name = f"attention/{unit}/{dtype}/{head_dim}/backward"
                    yield Case(name, partial(_backward, unit, dtype, head_dim), unit)


def _shape(use: str, head_dim: int, kind: str = "normal", mask: str = "causal") -> Shape:
    _, queries, keys, page = USES[use]
    kv_heads = KV_HEADS if (kind, mask) == ("normal", "causal") or use == "decode-batch" else 1
    return Shape(queries, keys, kv_heads, GROUP, head_dim, page, mask, kind)


def _use(unit: str, dtype: str, head_dim: int, use: str) -> Iterator[Comparison]:
    kinds = ("normal", "wide", "cancelling", "nan") if head_dim == 128 and use != "decode-batch" else ("normal",)
    for kind in kinds:
        yield from _forward(unit, dtype, use, _shape(use, head_dim, kind))
    if head_dim == 128 and use in ("chunk", "packed"):
        yield from _forward(unit, dtype, use, _shape(use, head_dim, mask="full"))


def _forward(unit: str, dtype: str, use: str, shape: Shape) -> Iterator[Comparison]:
    contract, storage, most = attention_contract(unit, dtype, shape.mask), DTYPES[dtype], USES[use][0]
    q, k, v = attention_inputs(shape, dtype, 7)
    expected = []
    for first, count, start, keys in zip(
        starts_of(shape.queries), shape.queries, starts_of(shape.keys), shape.keys, strict=False
    ):
        dense = reference.DenseKeyValues(k[start : start + keys], v[start : start + keys])
        expected.append(reference.attention(q[first : first + count], np.arange(keys - count, keys), dense, contract))
    kv: Pages | Packed
    if shape.page:
        pages = paged(k, v, shape.keys, shape.page, dtype, 11)
        table = torch.zeros(len(shape.keys), COLUMNS, dtype=torch.int32)
        table[:, : pages.block_tables.shape[1]] = pages.block_tables
        kv = replace(pages, block_tables=table)
    else:
        kv = Packed(to_device(k, storage), to_device(v, storage), to_device(starts_of(shape.keys)))
    starts = to_device(starts_of(shape.queries))
    got = attention(to_device(q, storage), starts, most, kv, contract, save=not shape.page)
    yield compare(f"{shape.kind} {shape.mask}", got.output, np.concatenate(expected))


def _backward(unit: str, dtype: str, head_dim: int) -> Iterator[Comparison]:
    for mask in ("causal", "full"):
        shape = replace(_shape("packed", head_dim, mask=mask), queries=(33, 1, 20), keys=(70, 64, 20))
        contract, storage = attention_contract(unit, dtype, mask), DTYPES[dtype]
        q, k, v = attention_inputs(shape, dtype, 3)
        dy = values("normal", q.shape, dtype, 50)
        starts, key_starts = starts_of(shape.queries), starts_of(shape.keys)
        parts = expected_gradients(dy, q, k, v, starts, key_starts, contract)
        kv = Packed(to_device(k, storage), to_device(v, storage), to_device(key_starts))
        on = to_device(q, storage), to_device(starts)
        result = attention(*on, 4096, kv, contract, save=True)
        got = attention_backward(to_device(dy, storage), *on, 4096, kv, 4096, result, of_gradient(contract))
        for index, name in enumerate("qkv"):
            yield compare(f"{mask} gradient of {name}", got[index], np.concatenate([part[index] for part in parts]))
