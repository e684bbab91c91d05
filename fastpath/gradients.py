"""The backward passes as specification, in NumPy: the reference states forward operators only.

Each function mirrors the sequence of operations that the kernel's docstring promises, from the reference's arithmetic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.dot import dot
from reference.formats import FORMATS
from reference.operators import AttentionContract
from reference.operators._online_softmax import LOG2E
from reference.operators.rope import RopeContract, RopeTable, rope
from reference.primitives import PRIMITIVES
from reference.reductions.tree import pairs_tree
from reference.rounding import round_to

ONE = np.float32(1)
#: Rows whose weight gradients form one chain.
WEIGHT_ROWS = 64


def narrow(x: Float32Array, dtype: str) -> Float32Array:
    """float32 ``x`` rounded to ``dtype``."""
    return x if dtype == "float32" else round_to(x, FORMATS[dtype])


class NormGradients(NamedTuple):
    """float32 arrays like ``x`` and ``weight``."""

    x: Float32Array
    weight: Float32Array


def norm(
    grad_output: Float32Array,
    x: Float32Array,
    weight: Float32Array,
    epsilon: float,
    dtype: str,
    grad_residual: Float32Array | None = None,
) -> NormGradients:
    """Gradients of a norm over the last axis of [..., n]."""
    shape, n = x.shape, np.float32(x.shape[-1])
    dy, rows = grad_output.reshape(-1, shape[-1]), x.reshape(-1, shape[-1])
    with np.errstate(all="ignore"):
        scale = PRIMITIVES["rsqrt"]["rlk"](sum_of_products(rows, rows) / n + np.float32(epsilon))
        slope = dy * weight
        pull = (sum_of_products(slope, rows) / n * scale) * scale
        dx = scale[:, None] * fused_multiply_add(rows, -pull[:, None], slope)
        if grad_residual is not None:
            dx = dx + grad_residual.reshape(dx.shape)
        dw = np.zeros(shape[-1:], np.float32)
        for first in range(0, len(rows), WEIGHT_ROWS):
            partial = np.zeros_like(dw)
            for row in range(first, min(first + WEIGHT_ROWS, len(rows))):
                partial = fused_multiply_add(dy[row], rows[row] * scale[row], partial)
            dw = dw + partial
    return NormGradients(narrow(dx, dtype).reshape(shape), narrow(dw, dtype))


def sum_of_products(a: Float32Array, b: Float32Array) -> Float32Array:
    """Row sums of a * b, [rows, n] each: 256 lanes (fewer in short rows) by FMA, then the tree of adjacent pairs."""
    width = min(256, 1 << (a.shape[1].bit_length() - 1))
    missing = ((0, 0), (0, -a.shape[1] % width))
    left, right = (np.pad(part, missing).reshape(len(a), -1, width) for part in (a, b))
    lanes = np.zeros((len(a), width), np.float32)
    for chunk in range(left.shape[1]):
        lanes = fused_multiply_add(left[:, chunk], right[:, chunk], lanes)
    return pairs_tree(lanes)


def swiglu(
    grad_output: Float32Array, gate: Float32Array, up: Float32Array, dtype: str
) -> tuple[Float32Array, Float32Array]:
    """Gradients of gate and up."""
    with np.errstate(all="ignore"):
        denominator = ONE + PRIMITIVES["exp"]["rlk"](-gate)
        s = ONE / denominator
        slope = s * fused_multiply_add(gate, ONE - s, ONE)
        return narrow((grad_output * up) * slope, dtype), narrow(grad_output * (gate / denominator), dtype)


def rotation(grad_output: Float32Array, table: RopeTable, contract: RopeContract) -> Float32Array:
    """Gradient of RoPE: the rotation by the opposite angle."""
    return rope(grad_output, RopeTable(table.cos, -table.sin), contract)


def embedding(grad_output: Float32Array, token_ids: NDArray[np.int64], vocabulary: int, dtype: str) -> Float32Array:
    """Gradient of the table: occurrences of a token added in ascending order."""
    total = np.zeros((vocabulary, grad_output.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for row, token in enumerate(token_ids):
            total[token] += grad_output[row]
    return narrow(total, dtype)


class AttentionGradients(NamedTuple):
    """float32 arrays like the queries, keys and values of one sequence."""

    q: Float32Array
    k: Float32Array
    v: Float32Array


def attention(
    grad_output: Float32Array, q: Float32Array, k: Float32Array, v: Float32Array, contract: AttentionContract
) -> AttentionGradients:
    """Gradients of causal or full attention of the last tokens of one sequence over its keys.

    Args:
        grad_output, q: float32, [tokens, heads, head_dim].
        k, v: float32, [keys, KV heads, head_dim].
    """
    tokens, heads, head_dim = q.shape
    keys, kv_heads, dtype = len(k), k.shape[1], str(contract.rounding.output)
    group = heads // kv_heads
    end = np.arange(keys - tokens, keys) + 1 if contract.domain.mask == "causal" else np.full(tokens, keys)
    seen = np.arange(keys) < np.repeat(end, group)[:, None]
    factor = 1.0 / math.sqrt(head_dim)
    grads = AttentionGradients(np.empty_like(q), np.empty_like(k), np.empty_like(v))
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        rows, dy = (np.ascontiguousarray(part[:, mine]).reshape(-1, head_dim) for part in (q, grad_output))
        k_head, v_head = np.ascontiguousarray(k[:, head]), np.ascontiguousarray(v[:, head])
        with np.errstate(all="ignore"):
            s = _dot(rows, k_head.T, None, contract) * np.float32(factor * LOG2E)
            s = np.where(seen, s, np.float32(-np.inf))
            maximum, total, output = _forward(s, v_head, contract)
            p = np.where(seen, PRIMITIVES["exp2_nonpositive"]["rlk"](s - maximum[:, None]), np.float32(0))
            p = p * (ONE / total)[:, None]
            delta = pairs_tree(dy * output)
            ds = p * (_dot(dy, v_head.T, None, contract) - delta[:, None])
            p, ds = narrow(p, dtype), narrow(ds, dtype)
            dq = _dot(ds, k_head, None, contract) * np.float32(factor)
            grads.q[:, mine] = narrow(dq, dtype).reshape(tokens, group, head_dim)
            grads.k[:, head] = narrow(_dot(ds.T, rows, None, contract) * np.float32(factor), dtype)
            grads.v[:, head] = narrow(_dot(p.T, dy, None, contract), dtype)
    return grads


def _dot(a: Float32Array, b: Float32Array, c: Float32Array | None, contract: AttentionContract) -> Float32Array:
    """c + a @ b on the contract's matrix unit."""
    return dot(a, b, c, unit=contract.primitives.unit, input_format=contract.domain.input)


def _forward(
    s: Float32Array, v: Float32Array, contract: AttentionContract
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Maximum, row sum and output of the forward pass from masked scores [rows, keys]."""
    maximum = np.full(len(s), -np.inf, np.float32)
    total, weighed = np.zeros(len(s), np.float32), np.zeros((len(s), v.shape[1]), np.float32)
    exponential, dtype = PRIMITIVES["exp2_nonpositive"]["rlk"], str(contract.rounding.output)
    for start in range(0, s.shape[1], 64):
        block = s[:, start : start + 64]
        higher = np.maximum(maximum, block.max(axis=1))
        alpha = exponential(np.where(maximum == higher, np.float32(0), maximum - higher))
        p = np.where(np.isneginf(block), np.float32(0), exponential(block - higher[:, None]))
        padded = np.pad(p, ((0, 0), (0, 64 - p.shape[1])))
        total, maximum = fused_multiply_add(total, alpha, pairs_tree(padded)), higher
        start_from = weighed * alpha[:, None]
        weighed = _dot(narrow(p, dtype), v[start : start + 64], start_from, contract)
    return maximum, total, narrow(weighed / total[:, None] + np.float32(0), dtype)
