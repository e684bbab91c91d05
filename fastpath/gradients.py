"""The backward passes as specification, in NumPy: the reference states forward operators only.

Each function mirrors the sequence of operations that the kernel's docstring promises, from the reference's arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.formats import FORMATS
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
