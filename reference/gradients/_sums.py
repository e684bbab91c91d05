"""Sums that the gradients share: over a row, over the rows of sequences, over tokens on a matrix unit."""

from __future__ import annotations

import math

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.operators._arguments import float_array
from reference.operators._numerics import quiet
from reference.reductions.tree import pairs_tree

#: Orders of a sum of products over a row: name -> (in words, lanes).
PRODUCT_ORDERS = {
    f"lanes-tree-{lanes}": (
        f"over {lanes} lanes (a power of two within a shorter row), each a chain of FMA, then a tree of neighbours",
        lanes,
    )
    for lanes in (256, 64, 1024)
}
#: Rows of one sequence whose gradients form one chain.
ROW_BLOCKS = (64, 32, 128, 256)
ROW_WORDS = "adds the gradients of {value} neighbouring rows of a sequence in a chain, then these sums in order"
TOKEN_ORDERS = {
    "ascending": "goes through the tokens of a sequence upwards",
    "descending": "goes through the tokens of a sequence downwards",
}


@quiet()
def sum_of_products(a: Float32Array, b: Float32Array, order: str) -> Float32Array:
    """Sums of a * b over the last axis: float32 [...]."""
    lanes = PRODUCT_ORDERS[order][1]
    width = min(lanes, 1 << (a.shape[-1].bit_length() - 1))
    missing = [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % width)]
    left, right = (np.pad(part, missing).reshape(*a.shape[:-1], -1, width) for part in (a, b))
    total = np.zeros((*a.shape[:-1], width), np.float32)
    for chunk in range(left.shape[-2]):
        total = fused_multiply_add(left[..., chunk, :], right[..., chunk, :], total)
    return pairs_tree(total)


@quiet()
def row_gradient(slopes: Float32Array, values: Float32Array, rows: int, sums: Float32Array | None) -> Float32Array:
    """``sums`` and, sequence after sequence, block after block, chains of fma(slope, value, .) from +0.

    Args:
        slopes, values: float32, [sequences, tokens, ...].
        rows: tokens of a block; blocks are counted from the start of each sequence.
        sums: float32 [...], from which the addition goes on; None is +0.

    Returns:
        float32 [...]. Trailing tokens whose slopes are zero change no bit.
    """
    total = np.zeros(slopes.shape[2:], np.float32) if sums is None else sums.copy()
    for slope, value in zip(slopes, values, strict=True):
        for first in range(0, len(slope), rows):
            partial = np.zeros_like(total)
            for row in range(first, min(first + rows, len(slope))):
                partial = fused_multiply_add(slope[row], value[row], partial)
            total = total + partial
    return total


def bias_gradient(grad: Float32Array, rows: int, sums: Float32Array | None = None) -> Float32Array:
    """Gradient of a bias: as `row_gradient` with every value 1.

    Args:
        grad: float32, [sequences, tokens, outputs].
        rows: tokens of a block.
        sums: float32 [outputs], from which the addition goes on.

    Returns:
        float32 [outputs], not rounded.

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument.
    """
    grad = float_array(grad, "grad", "sequences, tokens, outputs")
    return row_gradient(grad, np.ones_like(grad), rows, checked_sums(sums, f"outputs={grad.shape[2]}"))


def checked_sums(sums: Float32Array | None, axes: str) -> Float32Array | None:
    """``sums`` if they are None, or a float32 array of these axes."""
    return None if sums is None else float_array(sums, "sums", axes)


def shared_segments(count: int, most: int) -> int:
    """Into how many equal parts ``count`` is cut: the largest number that divides both it and ``most``."""
    return math.gcd(count, most)
