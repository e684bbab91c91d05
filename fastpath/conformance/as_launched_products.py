"""Cases that run the catalogue's own code of products, of the head and of rows of logits; see `as_launched`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from fastpath.backend import DTYPES, EMULATED, current_target
from fastpath.conformance.frame import Case, Comparison, compare, to_device
from fastpath.conformance.inputs import values
from fastpath.machine_code.call import EPSILON, HIDDEN, contract, gradient
from fastpath.machine_code.code import as_if_vast
from fastpath.products import schedules
from fastpath.products.linear import linear
from fastpath.products.lm_head import lm_head
from fastpath.products.row_linear import row_linear
from fastpath.products.row_linear_norm import row_linear_norm
from fastpath.rows.entropy import FORMULAS, entropy, entropy_backward
from fastpath.rows.logprob import all_logprobs, logprob, logprob_gradient
from fastpath.rows.logsumexp import logsumexp
from fastpath.rows.processed_logits import processed_logits, processed_logits_backward
from reference import gradients
from reference import operators as reference
from reference.operators._numerics import narrow

#: Rows of a large batch: a multiple of 16, which the compiler sees, and no multiple of a tile of 64 or 128.
MANY = 80
#: A vocabulary that 16 divides and no block does.
VOCABULARY = 2064


def cases() -> Iterator[Case]:
    """Only where code is emulated."""
    if not EMULATED:
        return
    for unit in current_target().units:
        for dtype in DTYPES if unit == "fma32-seq" else ("bfloat16",):
            for operator, check in (("linear", _linear), ("row_linear_norm", _norm), ("lm_head", _head)):
                yield Case(f"{operator}/as-launched/{unit}/{dtype}", partial(check, unit, dtype), unit)
    yield Case("logsumexp/as-launched/short", _short)
    yield Case("logprob/as-launched", _logprob)
    yield Case("all_logprobs/as-launched", _all_logprobs)
    yield Case("entropy/as-launched", _entropy)
    yield Case("processed_logits/as-launched", _processed)


def _linear(unit: str, dtype: str) -> Iterator[Comparison]:
    of_linear, of_row = contract("linear", dtype, unit), contract("row_linear", dtype, unit)
    x, w = values("wide", (65, 200), dtype, 1), values("normal", (72, 200), dtype, 2)
    got = linear(to_device(x, DTYPES[dtype]), to_device(w, DTYPES[dtype]), of_linear)
    yield compare("ragged", got, reference.linear(x, w, of_linear))
    for tokens in (128, 256, 4096):
        for operator, function, own, inputs in (
            ("linear", linear, of_linear, 512),
            ("row_linear", row_linear, of_row, 3072),
            ("row_linear", row_linear, of_row, 2048),
        ):
            x, w = values("cancelling", (MANY, inputs), dtype, 3), values("wide", (144, inputs), dtype, 4)
            with schedules.as_if(tokens):
                got = function(to_device(x, DTYPES[dtype]), to_device(w, DTYPES[dtype]), own)
            yield compare(f"{operator} {tokens} {inputs}", got, getattr(reference, operator)(x, w, own))


def _norm(unit: str, dtype: str) -> Iterator[Comparison]:
    own, norm, tokens, inputs = contract("row_linear", dtype, unit), contract("rms_norm", dtype), 8, 1024
    x, w = values("normal", (tokens, inputs), dtype, 1), values("normal", (HIDDEN, inputs), dtype, 2)
    residual, weight = values("normal", (tokens, HIDDEN), dtype, 3), values("normal", (HIDDEN,), dtype, 4)
    x_on, w_on, residual_on, weight_on = (to_device(part, DTYPES[dtype]) for part in (x, w, residual, weight))
    got = row_linear_norm(x_on, w_on, residual_on, weight_on, EPSILON, own, norm)
    want = reference.rms_norm(reference.row_linear(x, w, own), weight, EPSILON, norm, residual)
    yield compare("output", got.output, want.output)
    assert got.residual is not None
    yield compare("residual", got.residual, want.residual)


def _head(unit: str, dtype: str) -> Iterator[Comparison]:
    own, inputs = contract("lm_head", dtype, unit), 512
    w = values("normal", (VOCABULARY, inputs), dtype, 2)
    for tokens in (1, 8, 64, 128, 256, 4096):
        x = values("normal", (min(tokens, MANY), inputs), dtype, tokens)
        x_on, w_on = to_device(x, DTYPES[dtype]), to_device(w, DTYPES[dtype])
        expected = reference.lm_head(x, w, own)
        # as with Qwen3-8B's vocabulary: a weight of float32, and 4096 rows of logits, are beyond 2 GiB
        logits = (torch.float32, expected.shape)
        vast = {(torch.float32, w.shape), *({logits} if tokens == 4096 else ())}
        with schedules.as_if(tokens), as_if_vast(vast):
            yield compare(f"{tokens}", lm_head(x_on, w_on, own), expected)


def _rows_of_logits(columns: int) -> Any:
    """48 rows, some of their logits masked."""
    x = values("wide", (48, columns), "float32", columns)
    x[:, columns // 2 + 1 :: 3] = -np.inf
    return x


def _short() -> Iterator[Comparison]:
    own, x = contract("logsumexp", "bfloat16"), _rows_of_logits(700)
    yield compare("value", logsumexp(to_device(x), own).value, reference.logsumexp(x, own).value)


def _parts() -> tuple[Any, Any, Any, Any]:
    own, x = contract("logsumexp", "bfloat16"), _rows_of_logits(VOCABULARY)
    return x, to_device(x), reference.logsumexp(x, own), logsumexp(to_device(x), own)


def _logprob() -> Iterator[Comparison]:
    x, on, lse, lse_on = _parts()
    targets = np.random.default_rng(1).integers(0, VOCABULARY, len(x))
    for formula in ("x - lse", "(x - max) - log(sum)"):
        own = contract("logprob", "bfloat16").override("order.formula", formula)
        got = logprob(on, to_device(targets), lse_on, own)
        yield compare(formula, got, reference.logprob(x, targets, lse, own))
    back, upstream = gradient("logprob", "float32"), values("wide", (len(x),), "float32", 2)
    want = gradients.logprob_backward(upstream, x, targets, lse.value, back)
    for name, dtype in DTYPES.items():
        got = logprob_gradient(on, to_device(targets), to_device(lse.value), to_device(upstream), back, dtype)
        yield compare(f"gradient {name}", got, narrow(want, name))


def _all_logprobs() -> Iterator[Comparison]:
    x, on, lse, lse_on = _parts()
    for formula in ("x - lse", "(x - max) - log(sum)"):
        own = contract("logprob", "bfloat16").override("order.formula", formula)
        columns = [reference.logprob(x, np.full(len(x), v), lse, own) for v in range(VOCABULARY)]
        yield compare(formula, all_logprobs(on, lse_on, own), np.stack(columns, 1))


def _entropy() -> Iterator[Comparison]:
    x, on, lse, lse_on = _parts()
    sums = contract("logsumexp", "bfloat16")
    for formula in FORMULAS:
        own = contract("entropy", "bfloat16").override("order.formula", formula)
        nats = reference.entropy(x, lse, own, sums)
        yield compare(formula, entropy(on, lse_on, own, sums), nats)
    back, upstream = gradient("entropy", "float32"), values("wide", (len(x),), "float32", 2)
    got = entropy_backward(to_device(upstream), on, to_device(lse.value), to_device(nats), back)
    yield compare("gradient", got, gradients.entropy_backward(upstream, x, lse.value, nats, back))


def _processed() -> Iterator[Comparison]:
    x = np.round(values("normal", (48, VOCABULARY), "float32", 3) * np.float32(4))
    heat, kept = np.full(48, 0.7, np.float32), np.full(48, 40)
    mass = np.linspace(0.5, 1, 48).astype(np.float32)
    for order in ("ascending", "descending"):
        own = contract("processed_logits", "bfloat16").override("order.top_p", order)
        expected = reference.processed_logits(x, own, 0.7, 40, 0.9)
        yield compare(order, processed_logits(to_device(x), own, 0.7, 40, 0.9), expected)
        by_row = processed_logits(to_device(x), own, to_device(heat), to_device(kept), to_device(mass))
        rows = [reference.processed_logits(x[i : i + 1], own, 0.7, 40, float(mass[i])) for i in range(48)]
        yield compare(f"{order} by row", by_row, np.concatenate(rows))
    back, dy = gradient("processed_logits", "float32"), values("wide", x.shape, "float32", 4)
    got = processed_logits_backward(to_device(dy), to_device(expected), 0.7, back)
    yield compare("gradient", got, gradients.processed_logits_backward(dy, expected, 0.7, back))


__all__ = ["cases"]
