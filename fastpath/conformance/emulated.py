"""Cases for code executed in emulation: the schedules of large shapes on small ones.

A schedule there depends on the number of tokens (`fastpath.products.schedules`), so few rows run the code of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from fastpath.backend import DTYPES, EMULATED, current_target
from fastpath.collectives.all_reduce import merge_ranks
from fastpath.conformance.frame import Case, Comparison, compare, to_device
from fastpath.conformance.inputs import KINDS, values
from fastpath.products import schedules
from fastpath.products.linear import (
    input_gradient,
    input_gradient_merge,
    input_gradient_partial,
    linear,
    weight_gradient,
)
from fastpath.products.lm_head import lm_head, lm_head_logprob
from fastpath.products.row_linear import row_linear, row_linear_merge, row_linear_partial
from reference import gradients, operators
from reference.contract.profiles import profile
from reference.gradients import gradient_contract

#: As in the catalogue (`fastpath.machine_code.catalogue_products`).
TOKENS = (1, 8, 64, 128, 256, 4096)
FUNCTIONS: dict[str, Callable[..., Any]] = {"linear": linear, "row_linear": row_linear, "lm_head": lm_head}
#: operator, outputs, inputs; the last segment of 3072 is no multiple of the longest step.
SHAPES = (("linear", 144, 512), ("row_linear", 144, 2048), ("row_linear", 144, 3072), ("lm_head", 144, 512))
#: Most rows of one run.
ROWS = 70


def cases() -> Iterator[Case]:
    """Only where code is emulated."""
    if not EMULATED:
        return
    yield Case("all_reduce/merge", _merges)
    for unit in current_target().units:
        for dtype in DTYPES if unit == "fma32-seq" else ("bfloat16",):
            for tokens in TOKENS:
                yield Case(f"emulated/{unit}/{dtype}/{tokens}", partial(_products, unit, dtype, tokens), unit)
            for tokens in (64, 4096):
                name = f"emulated/{unit}/{dtype}/{tokens}/gradients"
                yield Case(name, partial(_gradients, unit, dtype, tokens), unit)


def _contract(operator: str, unit: str, dtype: str) -> Any:
    return profile(f"strict-v1/{unit}").contract(operator, dtype)


def _merges() -> Iterator[Comparison]:
    """The tree over 2, 3, 4 and 8 ranks' partial sums."""
    contract = _contract("all_reduce", "fma32-seq", "bfloat16")
    for ranks in (2, 3, 4, 8):
        partials = values("cancelling", (ranks, 64, 4096), "float32", ranks)
        yield compare(
            f"{ranks} ranks", merge_ranks(to_device(partials), contract), operators.all_reduce(list(partials), contract)
        )


def _products(unit: str, dtype: str, tokens: int) -> Iterator[Comparison]:
    storage, rows = DTYPES[dtype], min(tokens, ROWS)
    for index, (operator, outputs, inputs) in enumerate(SHAPES):
        contract, kind = _contract(operator, unit, dtype), KINDS[(index + tokens) % 4]
        x, w = values(kind, (rows, inputs), dtype, 1), values(kind, (outputs, inputs), dtype, 2)
        on = to_device(x, storage), to_device(w, storage)
        with schedules.as_if(tokens):
            got = FUNCTIONS[operator](*on, contract)
            yield compare(f"{operator} {kind} {inputs}", got, getattr(operators, operator)(x, w, contract))
            if operator == "row_linear":
                bias = values("wide", (outputs,), dtype, 3)
                added = row_linear(*on, contract, to_device(bias, storage))
                yield compare(f"{operator} bias", added, operators.row_linear(x, w, contract, bias))
                yield _partial(x, w, unit, dtype)
    yield from _head(unit, dtype, tokens, rows)


def _partial(x: Any, w: Any, unit: str, dtype: str) -> Comparison:
    """Two ranks, merged: each half is what a rank of tensor parallelism computes."""
    contract, reduction = _contract("row_linear", unit, dtype), _contract("all_reduce", unit, dtype)
    halves = [
        np.ascontiguousarray(part) for pair in zip(np.split(x, 2, 1), np.split(w, 2, 1), strict=True) for part in pair
    ]
    on = [to_device(part, DTYPES[dtype]) for part in halves]
    parts = [row_linear_partial(on[i], on[i + 1], contract, 2) for i in (0, 2)]
    merged = row_linear_merge(torch.stack(parts), contract, reduction)
    return compare("two ranks", merged, operators.row_linear(x, w, contract))


def _head(unit: str, dtype: str, tokens: int, rows: int) -> Iterator[Comparison]:
    head, lse, contract = (_contract(name, unit, dtype) for name in ("lm_head", "logsumexp", "logprob"))
    x, w = values("normal", (rows, 256), dtype, 4), values("normal", (2064, 256), dtype, 5)
    targets = np.random.default_rng(1).integers(0, 2064, rows)
    logits = operators.lm_head(x, w, head)
    expected = operators.logsumexp(logits, lse)
    operands = (to_device(x, DTYPES[dtype]), to_device(w, DTYPES[dtype]), to_device(targets))
    with schedules.as_if(tokens):
        chosen, got = lm_head_logprob(*operands, head, lse, contract)
    yield compare("logprob", chosen, operators.logprob(logits, targets, expected, contract))
    yield compare("logsumexp", got.value, expected.value)


def _gradients(unit: str, dtype: str, tokens: int) -> Iterator[Comparison]:
    storage, rows = DTYPES[dtype], min(tokens, 256)
    grad, x = values("cancelling", (1, rows, 144), dtype, 3), values("normal", (1, rows, 80), dtype, 1)
    wide, w = values("cancelling", (rows, 2048), dtype, 6), values("normal", (2048, 80), dtype, 2)
    for operator in ("linear", "row_linear"):
        own: Any = gradient_contract(_contract(operator, unit, dtype))
        with schedules.as_if(tokens):
            back = input_gradient(to_device(wide, storage), to_device(w, storage), own)
            yield compare(f"{operator} input", back, gradients.linear_input_gradient(wide, w, own))
            part = input_gradient_partial(to_device(wide, storage), to_device(w, storage), own, 1, joined=2)
            merged = input_gradient_merge(part[None], own)
            yield compare(f"{operator} joined", merged, gradients.linear_input_gradient(wide, w, own, joined=2))
        # the product of the weights' gradient has the features as its rows
        with schedules.as_if(12288):
            on = to_device(grad, storage), to_device(x, storage)
            expected = gradients.linear_weight_gradient(grad, x, own)
            yield compare(f"{operator} weight", weight_gradient(*on, own), expected)
            sums = torch.zeros(144, 80, dtype=torch.float32)
            weight_gradient(*on, own, sums)
            yield compare(f"{operator} weight, sums", sums, expected)


__all__ = ["cases"]
