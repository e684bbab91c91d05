"""Gradients of scaled dot-product attention over one sequence (Dao et al. 2022), every sum in a fixed order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, Value, choice, format_choice
from reference.operators._arguments import float_array, positive, same_shape
from reference.operators._numerics import (
    ATTENTION_EXPS,
    BLOCK_ORDERS,
    UNIT_NAMES,
    UNIT_WORDS,
    narrow,
    quiet,
    require_unit,
    row_order_words,
    row_sum,
    unit_dot,
    unit_for,
)
from reference.operators._online_softmax import LOG2E
from reference.operators.attention import AttentionResult

_EXPS = tuple(name for name, (base, _) in ATTENTION_EXPS.items() if base == "2")


@dataclass(frozen=True)
class Domain(Group):
    input: str = choice(
        ("bfloat16", "float16", "float32"),
        "multiplies {value} operands",
        equivalent="operands outside the format are refused; only a matrix unit that treats formats apart can differ",
        given=True,
    )
    mask: str = choice(
        ("causal", "full"),
        {"causal": "lets a query see keys up to its own position", "full": "lets a query see every key"},
        given=True,
    )


@dataclass(frozen=True)
class Order(Group):
    rows: str = choice(
        ("tokens", "heads"),
        {
            "tokens": "adds the gradients of a key token after token, within one head after head",
            "heads": "adds the gradients of a key head after head, within one token after token",
        },
        equivalent="with one query head for every KV head both are one order",
    )
    keys: str = choice(
        ("ascending", "descending"),
        {
            "ascending": "adds the gradient of a query from the first key upwards",
            "descending": "adds the gradient of a query from the last key downwards",
        },
    )
    delta: str = choice(BLOCK_ORDERS, row_order_words("adds the products of output and gradient"))


@dataclass(frozen=True)
class Rounding(Group):
    probabilities: str = format_choice(
        "bfloat16", "multiplies by float32 probabilities", "rounds probabilities to {value} before the product"
    )
    scores: str = format_choice(
        "bfloat16",
        "multiplies by float32 gradients of scores",
        "rounds gradients of scores to {value} before the products",
    )
    input: str = format_choice("bfloat16", "rounds the gradients to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    unit: str = choice(UNIT_NAMES, UNIT_WORDS)
    exp: str = choice(_EXPS, "computes the softmax's exponential as {value}")
    normalise: str = choice(
        ("reciprocal", "divide"),
        {
            "reciprocal": "multiplies exponentials by the reciprocal of the row sum",
            "divide": "divides exponentials by the row sum",
        },
    )


@dataclass(frozen=True)
class AttentionBackwardContract(Contract):
    """With the forward pass's maximum m, row sum l and output o, and c = 1/sqrt(d):
    s = (q . k) * fp32(log2(e) c);  p = exp2(s - m) * (1 / l);  delta = sum(dy * o);  ds = p * (dy . v - delta)
    dv = p^T dy;  dk = (ds^T q) * c;  dq = (ds k) * c"""

    operator: ClassVar[str] = "attention_backward"
    domain: Domain = Domain()
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        require_unit(self.primitives.unit, self.domain.input, self.operator)

    def dtype_changes(self, dtype: str) -> dict[str, Value]:
        return super().dtype_changes(dtype) | {"primitives.unit": unit_for(self.primitives.unit, dtype)}


class AttentionGradients(NamedTuple):
    """float32 arrays like the queries, keys and values."""

    q: Float32Array
    k: Float32Array
    v: Float32Array


@quiet()
def attention_backward(
    grad: Float32Array,
    q: Float32Array,
    k: Float32Array,
    v: Float32Array,
    result: AttentionResult,
    contract: AttentionBackwardContract,
    *,
    scale: float | None = None,
) -> AttentionGradients:
    """Gradients for the last tokens of one sequence over its keys; finite operands.

    Args:
        grad, q: float32, [tokens, heads, head_dim].
        k, v: float32, [keys, KV heads, head_dim].
        result: of the forward pass (:func:`reference.operators.attention.attention_result`).
        scale: factor of the scores; None is 1/sqrt(head_dim).

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; heads that do not divide; more queries than
            keys.
    """
    q = float_array(q, "q", "tokens, heads, head_dim")
    same_shape(float_array(grad, "grad", "tokens, heads, head_dim"), "grad", q, "q")
    tokens, heads, head_dim = q.shape
    k = float_array(k, "k", f"keys, kv_heads, head_dim={head_dim}")
    same_shape(float_array(v, "v", "keys, kv_heads, head_dim"), "v", k, "k")
    keys, kv_heads = k.shape[:2]
    if heads % kv_heads:
        raise ValueError(f"q: {heads} heads are not a multiple of the {kv_heads} KV heads")
    if tokens > keys:
        raise ValueError(f"q: {tokens} queries are more than the {keys} keys")
    factor = 1.0 / math.sqrt(head_dim) if scale is None else scale
    positive(factor, "scale")
    group = heads // kv_heads
    end = np.arange(keys - tokens, keys) + 1 if contract.domain.mask == "causal" else np.full(tokens, keys)
    grads = AttentionGradients(np.empty_like(q), np.empty_like(k), np.empty_like(v))
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        rows, dy, out = (_rows(part[:, mine], contract) for part in (q, grad, result.output))
        maximum, total = (_rows(part[:, mine], contract) for part in (result.maximum, result.total))
        seen = np.arange(keys) < _rows(np.repeat(end[:, None], group, axis=1), contract)[:, None]
        ours, theirs = np.ascontiguousarray(k[:, head]), np.ascontiguousarray(v[:, head])
        dq, grads.k[:, head], grads.v[:, head] = _head(
            rows, dy, out, ours, theirs, maximum, total, seen, factor, contract
        )
        grads.q[:, mine] = _tokens(dq, tokens, group, contract)
    return grads


def _rows(x: Float32Array, contract: AttentionBackwardContract) -> Float32Array:
    """[tokens, group, ...] as rows in the contract's order."""
    ordered = x if contract.order.rows == "tokens" else x.swapaxes(0, 1)
    return np.ascontiguousarray(ordered).reshape(-1, *x.shape[2:])


def _tokens(rows: Float32Array, tokens: int, group: int, contract: AttentionBackwardContract) -> Float32Array:
    """The inverse of `_rows`."""
    if contract.order.rows == "tokens":
        return rows.reshape(tokens, group, -1)
    return rows.reshape(group, tokens, -1).swapaxes(0, 1)


def _head(
    q: Float32Array,
    dy: Float32Array,
    output: Float32Array,
    k: Float32Array,
    v: Float32Array,
    maximum: Float32Array,
    total: Float32Array,
    seen: NDArray[np.bool_],
    factor: float,
    contract: AttentionBackwardContract,
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Gradients of the rows, keys and values under one KV head, rounded."""
    rounding, primitives = contract.rounding, contract.primitives
    fmt, scale = contract.domain.input, np.float32(factor)

    def product(a: Float32Array, b: Float32Array, form: str) -> Float32Array:
        return unit_dot(a, b, None, primitives.unit, fmt if form == fmt else "float32", ("grad", "operand"))

    s = product(q, np.ascontiguousarray(k.T), fmt) * np.float32(factor * LOG2E)
    shifted = np.where(seen, s - maximum[:, None], np.float32(-np.inf))
    p: Float32Array = np.where(seen, ATTENTION_EXPS[primitives.exp][1](shifted), np.float32(0))
    over = total[:, None]
    p = p * (np.float32(1) / over) if primitives.normalise == "reciprocal" else p / over
    delta = row_sum(dy * output, contract.order.delta)
    ds = narrow(p * (product(dy, np.ascontiguousarray(v.T), fmt) - delta[:, None]), rounding.scores)
    p = narrow(p, rounding.probabilities)
    step = slice(None) if contract.order.keys == "ascending" else slice(None, None, -1)
    dq = product(np.ascontiguousarray(ds[:, step]), np.ascontiguousarray(k[step]), rounding.scores) * scale
    dk = product(np.ascontiguousarray(ds.T), q, rounding.scores) * scale
    dv = product(np.ascontiguousarray(p.T), dy, rounding.probabilities)
    return narrow(dq, rounding.input), narrow(dk, rounding.input), narrow(dv, rounding.input)
