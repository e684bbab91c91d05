"""Calls that reach every kernel of a mixture of experts, in the shapes of Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from fastpath.backend import DTYPES
from fastpath.experts.grouped import Groups, grouped_linear
from fastpath.experts.moe_combine import moe_combine
from fastpath.experts.moe_router import moe_router
from fastpath.machine_code.call import Call, contract, empty

HIDDEN, FEATURES, EXPERTS, CHOSEN = 2048, 768, 128, 8


def expert_calls() -> Iterator[Call]:
    """Every call, in the order of the report."""
    for softmax in ("before_top_k", "after_top_k"):
        router = contract("moe_router", "bfloat16").override("order.softmax", softmax)
        logits = empty(64, EXPERTS, dtype=torch.float32)
        yield Call(f"moe_router/{softmax}", partial(moe_router, logits, CHOSEN, router))
    choices = empty(64, CHOSEN, dtype=torch.int64)
    for name, dtype in DTYPES.items():
        own, y = contract("moe_combine", name), empty(64 * CHOSEN, HIDDEN, dtype=dtype)
        weights = empty(64, CHOSEN, dtype=torch.float32)
        yield Call(f"moe_combine/{name}", partial(moe_combine, y, weights, choices, own, choices))
    for unit in ("mfma-cdna3-g8", "hopper-k16", "fma32-seq"):
        for name in DTYPES if unit == "fma32-seq" else ("bfloat16",):
            for tokens in (64, 4096):
                yield from _products(unit, name, tokens)


def _products(unit: str, name: str, tokens: int) -> Iterator[Call]:
    dtype, rows = DTYPES[name], tokens * CHOSEN
    places = empty(tokens, CHOSEN, dtype=torch.int64)
    groups = Groups(empty(rows, dtype=torch.int64), places, empty(EXPERTS + 1, dtype=torch.int64))
    x, up = empty(tokens, HIDDEN, dtype=dtype), empty(EXPERTS, 2 * FEATURES, HIDDEN, dtype=dtype)
    y, down = empty(rows, FEATURES, dtype=dtype), empty(EXPERTS, HIDDEN, FEATURES, dtype=dtype)
    gate_up, back = contract("linear", name, unit), contract("row_linear", name, unit)
    label = f"{unit}/{name}/{tokens}/experts"
    yield Call(f"linear/{label}", partial(grouped_linear, x, up, groups, gate_up), unit)
    yield Call(f"row_linear/{label}", partial(grouped_linear, y, down, groups, back, gather=False), unit)
