"""Calls that reach every kernel and schedule of matrix products, log-probabilities and the merge of collectives."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from fastpath.backend import DTYPES
from fastpath.collectives.all_reduce import merge_ranks
from fastpath.machine_code.call import EPSILON, FEATURES, HIDDEN, VOCABULARY, Call, contract, empty, gradient
from fastpath.products.linear import (
    input_gradient,
    input_gradient_merge,
    input_gradient_partial,
    linear,
    weight_gradient,
)
from fastpath.products.lm_head import lm_head, lm_head_logprob
from fastpath.products.row_linear import row_linear, row_linear_partial
from fastpath.products.row_linear_norm import row_linear_norm
from fastpath.rows.entropy import FORMULAS, entropy, entropy_backward
from fastpath.rows.logprob import all_logprobs, logprob, logprob_gradient
from fastpath.rows.logsumexp import LogsumexpResult, logsumexp
from fastpath.rows.processed_logits import processed_logits, processed_logits_backward

#: Numbers of tokens on either side of every choice that a schedule makes.
TOKENS = (1, 8, 64, 128, 256, 4096)
#: Outputs of one rank of Qwen3-0.6B, of Qwen3-8B, and of the head: the other choices.
LINEAR, ROW = ((4096, 1024), (6144, HIDDEN)), ((1024, 3072), (HIDDEN, HIDDEN), (HIDDEN, FEATURES))


def product_calls() -> Iterator[Call]:
    """Every call, in the order of the report."""
    for unit in ("mfma-cdna3-g8", "hopper-k16", "fma32-seq"):
        for name in DTYPES if unit == "fma32-seq" else ("bfloat16",):
            yield from _layers(unit, name)
            yield from _gradients(unit, name)
            yield from _row_norm(unit, name)
            yield from _head(unit, name)
    yield from _vocabulary()


def _layers(unit: str, name: str) -> Iterator[Call]:
    dtype = DTYPES[name]
    bias = empty(HIDDEN, dtype=dtype)
    for tokens in TOKENS:
        for operator, function, shapes in (("linear", linear, LINEAR), ("row_linear", row_linear, ROW)):
            for outputs, inputs in shapes:
                x, w = empty(tokens, inputs, dtype=dtype), empty(outputs, inputs, dtype=dtype)
                label = f"{operator}/{unit}/{name}/{tokens}x{outputs}x{inputs}"
                own = contract(operator, name, unit)
                yield Call(label, partial(function, x, w, own), unit)
        x, w = empty(tokens, HIDDEN // 2, dtype=dtype), empty(HIDDEN, HIDDEN // 2, dtype=dtype)
        own = contract("row_linear", name, unit)
        yield Call(f"row_linear/{unit}/{name}/{tokens}/partial", partial(row_linear_partial, x, w, own, 2), unit)
        yield Call(f"row_linear/{unit}/{name}/{tokens}/bias", partial(row_linear, x, w, own, bias), unit)
    ragged, narrow = empty(65, 200, dtype=dtype), empty(72, 200, dtype=dtype)
    yield Call(f"linear/{unit}/{name}/ragged", partial(linear, ragged, narrow, contract("linear", name, unit)), unit)


def _gradients(unit: str, name: str) -> Iterator[Call]:
    dtype = DTYPES[name]
    for tokens in (64, 4096):
        x, grad = empty(1, tokens, HIDDEN, dtype=dtype), empty(1, tokens, FEATURES, dtype=dtype)
        w, sums = empty(FEATURES, HIDDEN, dtype=dtype), empty(FEATURES, HIDDEN, dtype=torch.float32)
        for operator in ("linear", "row_linear"):
            own = gradient(operator, name, unit)
            label = f"{operator}/{unit}/{name}/{tokens}"
            yield Call(f"{label}/input-gradient", partial(input_gradient, grad[0], w, own), unit)
            yield Call(f"{label}/weight-gradient", partial(weight_gradient, grad, x, own), unit)
        yield Call(f"{label}/weight-gradient-on", partial(weight_gradient, grad, x, own, sums), unit)
        own = gradient("linear", name, unit)
        ranked = partial(input_gradient_partial, grad[0], w, own, 2, joined=2)
        yield Call(f"linear/{unit}/{name}/{tokens}/input-gradient-joined", ranked, unit)


def _row_norm(unit: str, name: str) -> Iterator[Call]:
    dtype, norm = DTYPES[name], contract("rms_norm", name)
    x, weight = empty(8, FEATURES, dtype=dtype), empty(HIDDEN, FEATURES, dtype=dtype)
    arguments = (x, weight, empty(8, HIDDEN, dtype=dtype), empty(HIDDEN, dtype=dtype), EPSILON)
    run = partial(row_linear_norm, *arguments, contract("row_linear", name, unit), norm)
    yield Call(f"row_linear_norm/{unit}/{name}", run, unit)


def _head(unit: str, name: str) -> Iterator[Call]:
    dtype = DTYPES[name]
    contracts = [contract("lm_head", name, unit), contract("logsumexp", name), contract("logprob", name)]
    w = empty(VOCABULARY, HIDDEN, dtype=dtype)
    for tokens in TOKENS:
        x, targets = empty(tokens, HIDDEN, dtype=dtype), empty(tokens, dtype=torch.int64)
        label = f"{unit}/{name}/{tokens}"
        yield Call(f"lm_head/{label}", partial(lm_head, x, w, contracts[0]), unit)
        yield Call(f"lm_head_logprob/{label}", partial(lm_head_logprob, x, w, targets, *contracts), unit)


#: Operators of rows of logits, and the merge of ranks.
OF_ROWS = ("logsumexp", "logprob", "entropy", "processed_logits", "all_reduce")


def _vocabulary() -> Iterator[Call]:
    logits = empty(64, VOCABULARY, dtype=torch.float32)
    column = empty(64, dtype=torch.float32)
    targets = empty(64, dtype=torch.int64)
    of = {name: contract(name, "bfloat16") for name in OF_ROWS}
    lse = LogsumexpResult(column, column, column)
    yield Call("logsumexp", partial(logsumexp, logits, of["logsumexp"]))
    yield Call("logsumexp/short", partial(logsumexp, logits[:, :700].contiguous(), of["logsumexp"]))
    for formula in ("x - lse", "(x - max) - log(sum)"):
        own = of["logprob"].override("order.formula", formula)
        yield Call(f"logprob/{formula}", partial(logprob, logits, targets, lse, own))
        yield Call(f"all_logprobs/{formula}", partial(all_logprobs, logits, lse, own))
    for name, dtype in DTYPES.items():
        slopes = partial(logprob_gradient, logits, targets, column, column, gradient("logprob", "float32"), dtype)
        yield Call(f"logprob/{name}/gradient", slopes)
    for formula in FORMULAS:
        own = of["entropy"].override("order.formula", formula)
        yield Call(f"entropy/{formula}", partial(entropy, logits, lse, own, of["logsumexp"]))
    of_nats = partial(entropy_backward, column, logits, column, column, gradient("entropy", "float32"))
    yield Call("entropy/gradient", of_nats)
    for order in ("ascending", "descending"):
        own = of["processed_logits"].override("order.top_p", order)
        yield Call(f"processed_logits/{order}", partial(processed_logits, logits, own, 0.7, 40, 0.9))
        yield Call(f"processed_logits/{order}/by-row", partial(processed_logits, logits, own, column, targets, column))
    of_logits = gradient("processed_logits", "float32")
    yield Call("processed_logits/gradient", partial(processed_logits_backward, logits, logits, 0.7, of_logits))
    merged = partial(input_gradient_merge, empty(2, 64, HIDDEN, dtype=torch.float32), gradient("linear", "bfloat16"))
    yield Call("linear/input-gradient-merge", merged)
    for ranks in (2, 3, 4, 8):
        partials = empty(ranks, 64, HIDDEN, dtype=torch.float32)
        yield Call(f"all_reduce/{ranks}", partial(merge_ranks, partials, of["all_reduce"]))
