"""The loops of the `strict-v1/fma32-seq` gradients on arrays that were checked and allocated before.

As `integration.backends.loops.compiled`: every operation in its order, one rounding each. Where a loop runs over
independent elements, branches are choices between values, so that it becomes vector instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from integration.backends.loops.compiled import (
    HALF,
    LARGEST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    NEVER,
    ONE,
    SMALLEST,
    TO_INTEGER,
    X0,
    X1,
    X2,
    X3,
    X4,
    ZERO,
    _compile,
    as_float,
    exp2_nonpositive,
    fma,
    round_bfloat16,
)
from reference.checks import Float32Array

_F = np.float32


@_compile
def smooth_exp(x: Any) -> Any:
    """e^x without branches, to the bit as `exp`."""
    reduced = LARGEST if x > LARGEST else (SMALLEST if x < SMALLEST else x)
    k = fma(reduced, LOG2_E, TO_INTEGER) - TO_INTEGER
    r = fma(k, LN2_LOW, fma(k, LN2_HIGH, reduced))
    p = fma(X0, r, X1)
    p = fma(p, r, X2)
    p = fma(p, r, X3)
    p = fma(p, r, X4)
    p = fma(fma(p, r, ONE), r, ONE)
    n = np.int32(ZERO if x != x else k)
    half = np.int32(n >> np.int32(1))
    first = as_float(np.int32((half + np.int32(127)) << np.int32(23)))
    second = as_float(np.int32((n - half + np.int32(127)) << np.int32(23)))
    p = (p * first) * second
    bounded = -NEVER if x > LARGEST else (ZERO if x < SMALLEST else p)
    return x if x != x else bounded


@_compile
def logprob_slopes(
    logits: Float32Array, targets: NDArray[np.int64], value: Float32Array, grad: Float32Array, out: Float32Array
) -> None:
    """grad * ([column is the target] - e^(logit - value)) of [rows, columns]."""
    for t in range(logits.shape[0]):
        row, line, lse, dy = logits[t], out[t], value[t], grad[t]
        for v in range(row.shape[0]):
            line[v] = dy * (ZERO - smooth_exp(row[v] - lse))
        at = targets[t]
        line[at] = dy * (ONE - smooth_exp(row[at] - lse))


@_compile
def gate_slopes(
    grad: Float32Array, gate: Float32Array, up: Float32Array, of_gate: Float32Array, of_up: Float32Array
) -> None:
    """Gradients of SwiGLU on vectors."""
    for i in range(gate.size):
        g, dy = gate[i], grad[i]
        below = ONE + smooth_exp(-g)
        s = ONE / below
        of_gate[i] = (dy * up[i]) * (s * fma(g, ONE - s, ONE))
        of_up[i] = dy * (g / below)


@_compile
def norm_slopes(
    grad: Float32Array,
    x: Float32Array,
    weight: Float32Array,
    epsilon: Any,
    dx: Float32Array,
    normal: Float32Array,
) -> None:
    """Gradients of the rows of a norm, not rounded, and x * r; all but ``weight`` [rows, n]."""
    n = x.shape[1]
    lanes = 256
    while lanes > n:
        lanes //= 2
    squares, products = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    slope = np.empty(n, np.float32)
    for i in range(x.shape[0]):
        row, dy, line, normed = x[i], grad[i], dx[i], normal[i]
        squares[:] = ZERO
        products[:] = ZERO
        for j in range(n):
            slope[j] = dy[j] * weight[j]
        for first in range(0, n, lanes):
            count = min(lanes, n - first)
            for j in range(count):
                a = row[first + j]
                squares[j] = fma(a, a, squares[j])
                products[j] = fma(slope[first + j], a, products[j])
            for j in range(count, lanes):
                products[j] = products[j] + ZERO  # a missing element adds +0, which turns -0 into +0
        width = lanes
        while width > 1:
            width //= 2
            for j in range(width):
                squares[j] = squares[2 * j] + squares[2 * j + 1]
                products[j] = products[2 * j] + products[2 * j + 1]
        v = squares[0] / _F(n) + epsilon
        r = ONE / np.sqrt(v)
        if np.isfinite(v) and v != ZERO:
            high = v * r
            low = fma(v, r, -high)
            r = fma(HALF * r, fma(-low, r, fma(-high, r, ONE)), r)
        pull = -((products[0] / _F(n) * r) * r)
        for j in range(n):
            line[j] = r * fma(row[j], pull, slope[j])
            normed[j] = row[j] * r


@_compile
def add_rows(slopes: Float32Array, values: Float32Array, rows: int, sums: Float32Array) -> None:
    """sums [heads, n] += chains over blocks of ``rows`` tokens of slopes * values [tokens, sequences, heads, n]."""
    tokens, sequences, heads, n = slopes.shape
    partial = np.empty(n, np.float32)
    for head in range(heads):
        total = sums[head]
        for sequence in range(sequences):
            for first in range(0, tokens, rows):
                partial[:] = ZERO
                for token in range(first, min(first + rows, tokens)):
                    a, b = slopes[token, sequence, head], values[token, sequence, head]
                    for j in range(n):
                        partial[j] = fma(a[j], b[j], partial[j])
                for j in range(n):
                    total[j] = total[j] + partial[j]


@_compile
def scatter(grad: Float32Array, tokens: NDArray[np.int64], sums: Float32Array) -> None:
    """sums[token of a row] += row, one row after the other; grad [rows, n]."""
    for i in range(tokens.size):
        total, row = sums[tokens[i]], grad[i]
        for j in range(row.shape[0]):
            total[j] = total[j] + row[j]


@_compile
def attend_back(
    grad: Float32Array,
    q: Float32Array,
    keys: Float32Array,
    values: Float32Array,
    delta: Float32Array,
    maximum: Float32Array,
    total: Float32Array,
    scale: Any,
    factor: Any,
    narrow: bool,
    dq: Float32Array,
    dk: Float32Array,
    dv: Float32Array,
) -> None:
    """Gradients of causal attention of one whole sequence, not rounded.

    grad, q, dq [tokens, heads, d]; keys, values, dk, dv [tokens, KV heads, d]; delta, maximum, total [tokens, heads].
    ``scale`` is fp32(log2(e) * factor); ``narrow`` rounds probabilities and gradients of scores to bfloat16.
    """
    tokens, heads, dim = q.shape
    group = heads // keys.shape[1]
    place = np.empty(1, np.float32)
    bits = place.view(np.uint32)
    s, dp = np.empty(tokens, np.float32), np.empty(tokens, np.float32)
    for g in range(keys.shape[1]):
        across = np.ascontiguousarray(keys[:, g].T)
        values_across = np.ascontiguousarray(values[:, g].T)
        of_keys, of_values = np.zeros((tokens, dim), np.float32), np.zeros((tokens, dim), np.float32)
        for t in range(tokens):
            count = t + 1
            for h in range(g * group, (g + 1) * group):
                row, dy, acc = q[t, h], grad[t, h], dq[t, h]
                for j in range(count):
                    s[j] = ZERO
                    dp[j] = ZERO
                for d in range(dim):
                    a, b, line, other = row[d], dy[d], across[d], values_across[d]
                    for j in range(count):
                        s[j] = fma(a, line[j], s[j])
                        dp[j] = fma(b, other[j], dp[j])
                top, inverse, less = maximum[t, h], ONE / total[t, h], delta[t, h]
                for j in range(count):
                    p = exp2_nonpositive(s[j] * scale - top, bits, place) * inverse
                    s[j] = p
                    dp[j] = p * (dp[j] - less)
                if narrow:
                    round_bfloat16(s[:count])
                    round_bfloat16(dp[:count])
                for d in range(dim):
                    acc[d] = ZERO
                for j in range(count):
                    p, ds, key, of_key, of_value = s[j], dp[j], keys[j, g], of_keys[j], of_values[j]
                    for d in range(dim):
                        acc[d] = fma(ds, key[d], acc[d])
                        of_key[d] = fma(ds, row[d], of_key[d])
                        of_value[d] = fma(p, dy[d], of_value[d])
                for d in range(dim):
                    acc[d] = acc[d] * factor
        for t in range(tokens):
            for d in range(dim):
                dk[t, g, d] = of_keys[t, d] * factor
                dv[t, g, d] = of_values[t, d]
