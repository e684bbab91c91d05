"""Mixture of experts: router, grouped products and combine; ties, unused experts, and experts with all rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from fastpath.backend import DTYPES, INTERPRETED, current_target
from fastpath.conformance.frame import Case, Comparison, compare, to_device, to_numpy
from fastpath.conformance.inputs import values
from fastpath.experts.grouped import group, grouped_linear
from fastpath.experts.moe_combine import moe_combine
from fastpath.experts.moe_router import moe_router
from reference import operators
from reference.contract.profiles import profile

#: tokens, experts, k: Qwen3-30B-A3B has 128 and 8.
ROUTERS = ((3, 1, 1), (9, 8, 2), (5, 6, 3), (4, 300, 8)) if INTERPRETED else (
    (3, 1, 1), (70, 8, 2), (33, 6, 3), (65, 60, 4), (64, 128, 8), (17, 384, 6),
)  # fmt: skip
#: tokens, experts, k, outputs, inputs.
PRODUCTS = ((7, 4, 2, 17, 40),) if INTERPRETED else ((1, 8, 2, 70, 200), (65, 8, 2, 129, 256), (300, 16, 4, 96, 768))


def cases() -> Iterator[Case]:
    """All cases of this family."""
    yield Case("moe_router/values", _router)
    yield Case("moe_combine/values", _combine)
    for unit in current_target().units:
        for dtype in DTYPES if unit == "fma32-seq" else ("bfloat16",):
            yield Case(f"moe_experts/{unit}/{dtype}", partial(_products, unit, dtype), unit)


def _router() -> Iterable[Comparison]:
    strict: Any = profile("strict-v1").contract("moe_router")
    bare = strict.override("order.renormalise", False)
    for tokens, number, k in ROUTERS:
        for kind in ("normal", "wide", "signed_zero"):
            x = values(kind, (tokens, number), "float32", number)
            x = np.round(x) if kind == "normal" else x  # so that there are ties
            for own in (strict, bare, strict.override("order.softmax", "after_top_k")):
                got, expected = moe_router(to_device(x), k, own), operators.moe_router(x, k, own)
                label = f"{kind} {tokens}x{number} top {k} {own.order.softmax} {own.order.renormalise}"
                yield compare(f"{label} experts", got.experts, expected.experts)
                yield compare(f"{label} weights", got.weights, expected.weights)


def _combine() -> Iterable[Comparison]:
    for dtype, torch_dtype in DTYPES.items():
        strict: Any = profile("strict-v1").contract("moe_combine", dtype)
        for tokens, number, k in ROUTERS:
            rng = np.random.default_rng(tokens)
            chosen = np.stack([rng.permutation(number)[:k] for _ in range(tokens)])
            for kind in ("wide", "nan"):
                y, w = values(kind, (tokens, k, 72), dtype, 1), values("wide", (tokens, k), "float32", 2)
                for value in ("expert_index", "rank"):
                    own = strict.override("order.experts", value)
                    expected = operators.moe_combine(y, w, chosen, own)
                    arguments = (to_device(w), to_device(chosen), own)
                    yield compare(
                        f"{dtype} {kind} {k} {value}", moe_combine(to_device(y, torch_dtype), *arguments), expected
                    )
                    rows = rng.permutation(tokens * k)
                    moved = np.empty_like(y).reshape(-1, 72)
                    moved[rows] = y.reshape(-1, 72)
                    placed = moe_combine(to_device(moved, torch_dtype), *arguments, to_device(rows.reshape(tokens, k)))
                    yield compare(f"{dtype} {kind} {k} {value} placed", placed, expected)


def _products(unit: str, dtype: str) -> Iterable[Comparison]:
    torch_dtype = DTYPES[dtype]
    for operator in ("linear", "row_linear"):
        own: Any = profile(f"strict-v1/{unit}").contract(operator, dtype)
        function = getattr(operators, operator)
        for tokens, number, k, outputs, inputs in PRODUCTS:
            rng = np.random.default_rng(tokens)
            spread = np.stack([rng.permutation(number)[:k] for _ in range(tokens)])
            crowded = np.sort(np.tile(np.arange(k), (tokens, 1)) + number - k, axis=1)  # most experts have no row
            x, w = (
                values("cancelling", (tokens, inputs), dtype, 1),
                values("normal", (number, outputs, inputs), dtype, 2),
            )
            for label, chosen in (("spread", spread), ("crowded", crowded)):
                groups = group(to_device(chosen), number)
                order = np.argsort(chosen.reshape(-1), kind="stable")
                yield compare(f"{label} rows", groups.tokens, order // k)
                expected = np.concatenate([function(x[[row // k]], w[chosen.reshape(-1)[row]], own) for row in order])
                a, b = to_device(x, torch_dtype), to_device(w, torch_dtype)
                got = grouped_linear(a, b, groups, own)
                yield compare(f"{operator} {label} {tokens}x{number}", got, expected)
                gathered = to_device(to_numpy(a)[order // k], torch_dtype)
                yield compare(
                    f"{operator} {label} gathered", grouped_linear(gathered, b, groups, own, gather=False), expected
                )
