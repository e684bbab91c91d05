"""From logits to log-probabilities: logsumexp, logprob, processed_logits, the fused head and its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from fastpath.autograd import products as autograd_products
from fastpath.backend import DTYPES, INTERPRETED, current_target
from fastpath.conformance.frame import Case, Comparison, compare, to_device, to_numpy
from fastpath.conformance.inputs import KINDS, values
from fastpath.products.lm_head import lm_head_logprob
from fastpath.rows.entropy import FORMULAS, entropy, entropy_backward
from fastpath.rows.logprob import logprob, logprob_gradient
from fastpath.rows.logsumexp import finish, logsumexp, row_maximum, segment_sums
from fastpath.rows.processed_logits import processed_logits, processed_logits_backward
from reference import gradients, operators
from reference.checks import Float32Array
from reference.contract.profiles import profile
from reference.operators._numerics import narrow

#: tokens, vocabulary: shorter than the lanes, with empty and short last segments, and Qwen3's.
SHAPES = ((1, 1), (3, 5), (2, 700)) if INTERPRETED else (
    (1, 1), (3, 5), (5, 100), (3, 2050), (65, 5000), (9, 151936),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """All cases of this family."""
    yield Case("logsumexp/values", _logsumexp)
    yield Case("logsumexp/ranks", _ranks)
    yield Case("logprob/gradient", _gradient)
    yield Case("entropy/values", _entropy)
    yield Case("processed_logits/settings", _processed)
    for unit in current_target().units:
        for dtype in DTYPES if unit == "fma32-seq" else ("bfloat16",):
            yield Case(f"lm_head_logprob/{unit}/{dtype}", partial(_fused, unit, dtype), unit)
            yield Case(f"lm_head_logprob/{unit}/{dtype}/gradient", partial(_fused_gradient, unit, dtype), unit)
    if not INTERPRETED:
        yield Case("lm_head_logprob/hopper-k16/bfloat16/model", _model, "hopper-k16")


def _contracts(unit: str = "fma32-seq", dtype: str = "bfloat16") -> tuple[Any, Any, Any]:
    chosen = profile(f"strict-v1/{unit}")
    head, lse, contract = (chosen.contract(name, dtype) for name in ("lm_head", "logsumexp", "logprob"))
    return head, lse, contract


def _logits(kind: str, tokens: int, vocabulary: int) -> Float32Array:
    """Logits of a kind, none of whose rows is -inf alone."""
    x = values(kind, (tokens, vocabulary), "float32", tokens + vocabulary)
    x = x * np.float32(8) if kind == "normal" else x
    x[:, 0] = np.where(np.isneginf(x[:, 0]), np.float32(1), x[:, 0])
    return x


def _logsumexp() -> Iterable[Comparison]:
    _, lse, contract = _contracts()
    for tokens, vocabulary in SHAPES:
        for kind in KINDS if vocabulary < 10000 and not INTERPRETED else ("normal", "infinity", "nan"):
            x = _logits(kind, tokens, vocabulary)
            targets = np.random.default_rng(1).integers(0, vocabulary, tokens)
            got, expected = logsumexp(to_device(x), lse), operators.logsumexp(x, lse)
            for name in ("value", "total"):
                yield compare(f"{kind} {tokens}x{vocabulary} {name}", getattr(got, name), getattr(expected, name))
            # NumPy leaves the sign of a zero maximum open: both get +0
            canonical = expected.maximum + np.float32(0)
            yield compare(f"{kind} {tokens}x{vocabulary} maximum", got.maximum + 0.0, canonical)
            for formula in ("x - lse", "(x - max) - log(sum)"):
                own = contract.override("order.formula", formula)
                reference = operators.logprob(x, targets, expected._replace(maximum=canonical), own)
                chosen = logprob(to_device(x), to_device(targets), got, own)
                yield compare(f"{kind} {tokens}x{vocabulary} {formula}", chosen, reference)


def _ranks() -> Iterable[Comparison]:
    _, lse, _ = _contracts()
    x = _logits("normal", 1 if INTERPRETED else 4, 4096)
    expected = operators.logsumexp(x, lse)
    for ranks in (1, 2, 4, 8):
        shards = [to_device(shard) for shard in np.split(x, ranks, axis=1)]
        maximum = torch.stack([row_maximum(shard, lse) for shard in shards]).amax(0)
        sums = torch.cat([segment_sums(shard, maximum, lse, ranks) for shard in shards], 1)
        yield compare(f"TP {ranks}", finish(sums, maximum, lse).value, expected.value)


def _gradient() -> Iterable[Comparison]:
    _, lse, contract = _contracts()
    own: Any = gradients.gradient_contract(contract)
    for dtype, torch_dtype in DTYPES.items():
        x = _logits("normal", 5, 1100)
        targets, upstream = np.random.default_rng(1).integers(0, 1100, 5), values("wide", (5,), "float32", 2)
        value = operators.logsumexp(x, lse).value
        arguments = (to_device(x), to_device(targets), to_device(value), to_device(upstream))
        expected = _expected_gradient(x, targets, value, upstream, dtype)
        yield compare(dtype, logprob_gradient(*arguments, own, torch_dtype), expected)


def _expected_gradient(x: Float32Array, targets: Any, value: Any, upstream: Any, dtype: str) -> Float32Array:
    own: Any = gradients.gradient_contract(_contracts()[2])
    return narrow(gradients.logprob_backward(upstream, x, targets, value, own), dtype)


def _entropy() -> Iterable[Comparison]:
    chosen = profile("strict-v1")
    contract: Any = chosen.contract("entropy")
    sums: Any = chosen.contract("logsumexp")
    of: Any = gradients.gradient_contract(contract)
    for tokens, vocabulary in SHAPES:
        for kind in ("normal", "nan") if INTERPRETED else ("normal", "wide", "infinity", "nan"):
            x = _logits(kind, tokens, vocabulary)
            x[:, vocabulary // 2 + 1 :: 3] = -np.inf  # masked, as top-k and top-p leave them
            expected, got = operators.logsumexp(x, sums), logsumexp(to_device(x), sums)
            upstream = values("wide", (tokens,), "float32", 2)
            for formula in FORMULAS:
                own = contract.override("order.formula", formula)
                nats, found = operators.entropy(x, expected, own, sums), entropy(to_device(x), got, own, sums)
                yield compare(f"{kind} {tokens}x{vocabulary} {formula}", found, nats)
            want = gradients.entropy_backward(upstream, x, expected.value, nats, of)
            back = entropy_backward(to_device(upstream), to_device(x), to_device(expected.value), to_device(nats), of)
            yield compare(f"{kind} {tokens}x{vocabulary} gradient", back, want)


def _processed() -> Iterable[Comparison]:
    contract: Any = profile("strict-v1").contract("processed_logits")
    variants = (
        ("order.top_p", "descending"),
        ("domain.top_k_ties", "lowest_index"),
        ("primitives.temperature", "reciprocal"),
        ("order.filters", "top_p_top_k"),
    )
    settings: tuple[dict[str, Any], ...] = (
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.8, "temperature": 1.3},
        {"top_k": 40, "top_p": 0.5},
    )
    for own in (contract, *(contract.override(path, value) for path, value in variants)):
        for tokens, vocabulary in ((3, 5), (2, 300)) if INTERPRETED else ((3, 5), (2, 300), (40, 5000)):
            x = np.round(_logits("normal", tokens, vocabulary))  # rounded, so that there are ties
            corrupted = x.copy()
            corrupted[0, vocabulary // 2], corrupted[1, 1] = np.nan, np.inf
            for (kind, given), setting in product((("", x), ("NaN ", corrupted)), settings):
                expected = operators.processed_logits(given, own, **setting)
                got = processed_logits(to_device(given), own, **setting)
                yield compare(f"{kind}{tokens}x{vocabulary} {setting}", got, expected)
                of: Any = gradients.gradient_contract(own)
                dy, heat = values("wide", x.shape, "float32", 3), setting.get("temperature", 1.0)
                back = processed_logits_backward(to_device(dy), got, heat, of)
                want = gradients.processed_logits_backward(dy, expected, heat, of)
                yield compare(f"{kind}{tokens}x{vocabulary} {setting} gradient", back, want)


def _fused(unit: str, dtype: str) -> Iterable[Comparison]:
    head, lse, contract = _contracts(unit, dtype)
    tokens, vocabulary, hidden = (17, 40, 24) if INTERPRETED else (200, 5000, 128)
    for kind in ("normal",) if INTERPRETED else ("normal", "cancelling"):
        x, w = values(kind, (tokens, hidden), dtype, 1), values("normal", (vocabulary, hidden), dtype, 2)
        targets = np.random.default_rng(1).integers(0, vocabulary, tokens)
        logits = operators.lm_head(x, w, head)
        expected = operators.logsumexp(logits, lse)
        reference = operators.logprob(logits, targets, expected, contract)
        operands = (to_device(x, DTYPES[dtype]), to_device(w, DTYPES[dtype]), to_device(targets))
        for size in (2**28, 4 * vocabulary * 16):  # all tokens at once, and 16 at a time
            chosen, got = lm_head_logprob(*operands, head, lse, contract, size)
            yield compare(f"{kind} logprob", chosen, reference)
            yield compare(f"{kind} logsumexp", got.value, expected.value)


def _fused_gradient(unit: str, dtype: str) -> Iterable[Comparison]:
    head, lse, contract = _contracts(unit, dtype)
    tokens, vocabulary, hidden = (17, 64, 24) if INTERPRETED else (200, 1024, 128)
    x, w = values("normal", (tokens, hidden), dtype, 1), values("normal", (vocabulary, hidden), dtype, 2)
    targets, upstream = (
        np.random.default_rng(1).integers(0, vocabulary, tokens),
        values("normal", (tokens,), "float32", 4),
    )
    logits = operators.lm_head(x, w, head)
    value = operators.logsumexp(logits, lse).value
    slopes = _expected_gradient(logits, targets, value, upstream, dtype)
    own: Any = gradients.gradient_contract(head)
    of_x = gradients.linear_input_gradient(slopes, w, own)
    of_w = narrow(gradients.linear_weight_gradient(slopes[None], x[None], own), dtype)
    for size in (4 * vocabulary * 16,) if INTERPRETED else (2**28, 4 * vocabulary * 16):
        a, b = (to_device(array, DTYPES[dtype]).requires_grad_() for array in (x, w))
        out = autograd_products.lm_head_logprob(a, b, to_device(targets), head, lse, contract, size)
        out.backward(to_device(upstream))
        yield compare("x", a.grad, of_x)
        yield compare("weight", b.grad, of_w)


def _model() -> Iterable[Comparison]:
    """Qwen3-8B's head: sampled rows against the reference, all row counts against each other."""
    head, lse, contract = _contracts("hopper-k16")
    generator = torch.Generator("cuda").manual_seed(0)
    w = (torch.randn(151936, 1024, device="cuda", generator=generator) / 16).bfloat16()
    x = torch.randn(1024, 1024, device="cuda", generator=generator).bfloat16()
    targets = torch.randint(0, 151936, (1024,), device="cuda", generator=generator)
    whole, parts = lm_head_logprob(x, w, targets, head, lse, contract)
    for rows in (1, 8, 64, 256):
        got, own = lm_head_logprob(x[:rows], w, targets[:rows], head, lse, contract)
        yield compare(f"{rows} rows", got, whole[:rows])
        yield compare(f"{rows} rows logsumexp", own.value, parts.value[:rows])
    logits = operators.lm_head(to_numpy(x[:1]), to_numpy(w), head)
    expected = operators.logsumexp(logits, lse)
    yield compare("row 0", whole[:1], operators.logprob(logits, to_numpy(targets[:1]), expected, contract))
