"""linear, row_linear and lm_head: every kind of value, every schedule, all row counts, ranks, graphs, repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from fastpath.backend import DTYPES, EMULATED, INTERPRETED, ON_CPU, current_target
from fastpath.conformance.frame import Case, Comparison, compare, to_device
from fastpath.conformance.inputs import KINDS, sample, values
from fastpath.products.linear import (
    bias_gradient,
    input_gradient,
    input_gradient_merge,
    input_gradient_partial,
    linear,
    weight_gradient,
)
from fastpath.products.lm_head import lm_head
from fastpath.products.row_linear import row_linear, row_linear_merge, row_linear_partial
from fastpath.products.schedules import candidates
from reference import gradients, operators
from reference.contract.profiles import profile
from reference.gradients import gradient_contract

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"linear": linear, "row_linear": row_linear, "lm_head": lm_head}
#: tokens, outputs, inputs: ragged everywhere; K is a multiple of 8 for the segments.
RAGGED = ((1, 5, 24), (17, 70, 200), (33, 129, 328)) if not INTERPRETED else ((1, 5, 24), (17, 33, 40))
#: Qwen3-0.6B and Qwen3-8B: operator, outputs, inputs.
MODEL = (
    ("linear", 4096, 1024),
    ("linear", 6144, 1024),
    ("row_linear", 1024, 2048),
    ("row_linear", 1024, 3072),
    ("linear", 6144, 4096),
    ("linear", 24576, 4096),
    ("row_linear", 4096, 4096),
    ("row_linear", 4096, 12288),
)
ROWS = (1, 2, 7, 8, 16, 64, 65, 129, 256, 1000, 4096, 8192)


def cases() -> Iterator[Case]:
    """All cases of this family."""
    for unit in current_target().units:
        for dtype in DTYPES if unit == "fma32-seq" else ("bfloat16",):
            for operator in FUNCTIONS:
                name = f"{operator}/{unit}/{dtype}"
                yield Case(f"{name}/values", partial(_values, operator, unit, dtype), unit)
            yield Case(f"row_linear/{unit}/{dtype}/ranks", partial(_ranks, unit, dtype), unit)
            yield Case(f"linear/{unit}/{dtype}/bias", partial(_bias, unit, dtype), unit)
            yield Case(f"linear/{unit}/{dtype}/gradients", partial(_gradients, unit, dtype), unit)
        if not INTERPRETED:
            for operator in ("linear", "row_linear"):
                for tokens in (8, 64, 304):
                    name = f"{operator}/{unit}/bfloat16/schedules/{tokens}"
                    yield Case(name, partial(_schedules, operator, unit, tokens), unit)
        if not ON_CPU:
            yield Case(f"linear/{unit}/bfloat16/model", partial(_model, unit), unit)
            yield Case(f"linear/{unit}/bfloat16/graph", partial(_graph, unit), unit)
            yield Case(f"linear/{unit}/bfloat16/repeats", partial(_repeats, unit), unit)


def _contract(operator: str, unit: str, dtype: str) -> Any:
    return profile(f"strict-v1/{unit}").contract(operator, dtype)


def _operands(kind: str, tokens: int, outputs: int, inputs: int, dtype: str) -> tuple[Any, Any]:
    return values(kind, (tokens, inputs), dtype, 1), values(kind, (outputs, inputs), dtype, 2)


def _values(operator: str, unit: str, dtype: str) -> Iterable[Comparison]:
    contract, torch_dtype = _contract(operator, unit, dtype), DTYPES[dtype]
    for kind in KINDS:
        for tokens, outputs, inputs in RAGGED:
            x, w = _operands(kind, tokens, outputs, inputs, dtype)
            got = FUNCTIONS[operator](to_device(x, torch_dtype), to_device(w, torch_dtype), contract)
            expected = getattr(operators, operator)(x, w, contract)
            yield compare(f"{kind} {tokens}x{outputs}x{inputs}", got, expected)


def _ranks(unit: str, dtype: str) -> Iterable[Comparison]:
    contract, reduction = _contract("row_linear", unit, dtype), _contract("all_reduce", unit, dtype)
    torch_dtype = DTYPES[dtype]
    tokens, outputs, inputs = (5, 17, 64) if INTERPRETED else (33, 130, 1024)
    for kind in ("normal", "wide", "cancelling"):
        x, w = _operands(kind, tokens, outputs, inputs, dtype)
        expected = operators.row_linear(x, w, contract)
        for ranks in (1, 2, 4, 8):
            xs, ws = np.split(x, ranks, axis=1), np.split(w, ranks, axis=1)
            partials = [
                row_linear_partial(to_device(a, torch_dtype), to_device(b, torch_dtype), contract, ranks)
                for a, b in zip(xs, ws, strict=True)
            ]
            yield compare(f"{kind} TP {ranks}", row_linear_merge(torch.stack(partials), contract, reduction), expected)
        columns = [linear(to_device(x, torch_dtype), to_device(b, torch_dtype), contract) for b in np.split(w[:16], 4)]
        yield compare(f"{kind} column parallel", torch.cat(columns, 1), expected[:, :16])


def _bias(unit: str, dtype: str) -> Iterable[Comparison]:
    torch_dtype = DTYPES[dtype]
    tokens, outputs, inputs = RAGGED[1]
    for operator in ("linear", "row_linear"):
        contract = _contract(operator, unit, dtype)
        x, w = _operands("normal", tokens, outputs, inputs, dtype)
        bias = values("wide", (outputs,), dtype, 3)
        arguments = (to_device(x, torch_dtype), to_device(w, torch_dtype), contract, to_device(bias, torch_dtype))
        expected = getattr(operators, operator)(x, w, contract, bias)
        yield compare(operator, FUNCTIONS[operator](*arguments), expected)


def _gradients(unit: str, dtype: str) -> Iterable[Comparison]:
    torch_dtype = DTYPES[dtype]
    tokens, outputs, inputs = (5, 16, 24) if INTERPRETED else (77, 136, 200)
    sequences = 3
    for operator in ("linear", "row_linear"):
        own: Any = gradient_contract(_contract(operator, unit, dtype))
        x = values("normal", (sequences, tokens, inputs), dtype, 1)
        w = values("normal", (outputs, inputs), dtype, 2)
        grad = values("cancelling", (sequences, tokens, outputs), dtype, 3)
        d, a, b = (to_device(array, torch_dtype) for array in (grad, x, w))
        for joined in (1, 2):
            expected = gradients.linear_input_gradient(grad[0], w, own, joined=joined)
            yield compare(f"{operator} input, joined {joined}", input_gradient(d[0], b, own, joined=joined), expected)
        expected = gradients.linear_weight_gradient(grad, x, own)
        side_by_side = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in (d, a)]
        yield compare(f"{operator} weight", weight_gradient(d, a, own), expected)
        yield compare(
            f"{operator} weight, tokens side by side", weight_gradient(side_by_side[0], side_by_side[1], own), expected
        )
        sums = torch.zeros(outputs, inputs, dtype=torch.float32, device=a.device)
        for one in range(sequences):
            weight_gradient(d[one : one + 1], a[one : one + 1], own, sums)
        yield compare(f"{operator} weight, sequence after sequence", sums, expected)
        rows = d.transpose(0, 1).reshape(-1, outputs)
        expected = gradients.bias_gradient(grad, own.partition.rows)
        yield compare(f"{operator} bias", bias_gradient(rows, own, sequences=sequences), expected)
    yield from _shared_gradient(unit, dtype, tokens, outputs, inputs)


def _shared_gradient(unit: str, dtype: str, tokens: int, outputs: int, inputs: int) -> Iterable[Comparison]:
    """x's gradient of a column-parallel layer on 1, 2, 4 and 8 ranks, and of gate and up."""
    own: Any = gradient_contract(_contract("linear", unit, dtype))
    w, grad = values("normal", (2 * outputs, inputs), dtype, 2), values("normal", (tokens, 2 * outputs), dtype, 3)
    expected = gradients.linear_input_gradient(grad, w, own, joined=2)
    for ranks in (1, 2, 4, 8):
        mine = np.split(np.arange(2 * outputs).reshape(2, -1), ranks, axis=1)
        partials = [
            input_gradient_partial(
                to_device(grad[:, part.reshape(-1)], DTYPES[dtype]),
                to_device(w[part.reshape(-1)], DTYPES[dtype]),
                own,
                ranks,
                joined=2,
            )
            for part in mine
        ]
        yield compare(f"input of gate and up, TP {ranks}", input_gradient_merge(torch.stack(partials), own), expected)


def _schedules(operator: str, unit: str, tokens: int) -> Iterable[Comparison]:
    # emulated, a ragged tile beside a whole one is enough
    outputs, inputs = (144, 1024) if EMULATED else (528, 2048)
    contract, segments = _contract(operator, unit, "bfloat16"), 8 if operator == "row_linear" else 1
    x, w = _operands("wide", tokens, outputs, inputs, "bfloat16")
    columns = sample(np.random.default_rng(1), outputs, 96)
    expected = getattr(operators, operator)(x[:64], w[columns], contract)
    a, b = to_device(x, torch.bfloat16), to_device(w, torch.bfloat16)
    first = None
    for plan in candidates(current_target(), unit, tokens, segments):
        try:
            got = FUNCTIONS[operator](a, b, contract, plan=plan)
        except OutOfResources:  # a tile that this device cannot hold is no schedule of it
            continue
        first = got if first is None else first
        yield compare(f"{plan}", got[:64, columns], expected)
        yield Comparison(f"{plan} all", got.numel(), _unequal(got, first))


def _model(unit: str) -> Iterable[Comparison]:
    rng = np.random.default_rng(3)
    for operator, outputs, inputs in MODEL:
        contract = _contract(operator, unit, "bfloat16")
        generator = torch.Generator("cuda").manual_seed(outputs + inputs)
        draw = partial(torch.randn, device="cuda", generator=generator)
        x, w = draw(max(ROWS), inputs).bfloat16(), draw(outputs, inputs).bfloat16()
        picked, columns = sample(rng, max(ROWS), 8), sample(rng, outputs, 32)
        expected = getattr(operators, operator)(
            x[picked].float().cpu().numpy(), w[columns].float().cpu().numpy(), contract
        )
        whole = FUNCTIONS[operator](x, w, contract)
        yield compare(f"{operator} {outputs}x{inputs} sample", whole[picked][:, columns], expected)
        for rows in ROWS:
            got = FUNCTIONS[operator](x[:rows], w, contract)
            yield Comparison(f"{operator} {outputs}x{inputs} {rows} rows", got.numel(), _unequal(got, whole[:rows]))


def _graph(unit: str) -> Iterable[Comparison]:
    for operator in ("linear", "row_linear"):
        contract = _contract(operator, unit, "bfloat16")
        for tokens in (8, 256):
            x, w = (torch.randn(size, 2048, device="cuda").bfloat16() for size in (tokens, 1024))
            FUNCTIONS[operator](x, w, contract)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = FUNCTIONS[operator](x, w, contract)
            for _ in range(3):
                x.copy_(torch.randn_like(x))
                out.zero_()
                graph.replay()
                eager = FUNCTIONS[operator](x, w, contract)
                yield Comparison(f"{operator} {tokens} tokens replayed", out.numel(), _unequal(out, eager))


def _repeats(unit: str) -> Iterable[Comparison]:
    for operator in ("linear", "row_linear"):
        contract = _contract(operator, unit, "bfloat16")
        for tokens, repeats in ((8, 1000), (256, 1000)):
            x, w = (torch.randn(size, 2048, device="cuda").bfloat16() for size in (tokens, 1024))
            first = FUNCTIONS[operator](x, w, contract)
            bad = torch.zeros((), dtype=torch.int64, device="cuda")
            for _ in range(repeats):
                bad += (FUNCTIONS[operator](x, w, contract).view(torch.int16) != first.view(torch.int16)).sum()
            yield Comparison(f"{operator} {tokens} tokens, {repeats} times", repeats * first.numel(), int(bad))


def _unequal(left: torch.Tensor, right: torch.Tensor) -> int:
    """Elements of two bfloat16 tensors without NaN whose bits differ."""
    return int((left.view(torch.int16) != right.view(torch.int16)).sum())
