"""Gradients of the norm of query and key heads: a chain over tokens for every head, then a tree over heads.

Ranks hold whole heads; with a chain per head their sums are subtrees of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice
from reference.gradients._sums import ROW_BLOCKS, ROW_WORDS, checked_sums, row_gradient
from reference.gradients.linear import rank_segments
from reference.gradients.rms_norm import Order, Primitives, RmsNormGradients, Rounding, row_gradients
from reference.operators._arguments import float_array, positive, same_shape
from reference.reductions.tree import pairs_tree


@dataclass(frozen=True)
class Partition(Group):
    rows: int = choice(ROW_BLOCKS, ROW_WORDS)
    segments: int = choice(
        (8, 1, 2, 4, 16),
        "merges heads in at most {value} equal segment(s), each a tree, then the segments up a tree",
        equivalent="heads that are a power of two form one tree, however they are cut",
    )


@dataclass(frozen=True)
class QkNormBackwardContract(Contract):
    """As rms_norm_backward for every head; dweight = sum over heads of the sum over tokens of dy * (x * r)"""

    operator: ClassVar[str] = "qk_norm_backward"
    partition: Partition = Partition()
    order: Order = Order()  # noqa: RUF009 - frozen
    rounding: Rounding = Rounding()  # noqa: RUF009 - frozen
    primitives: Primitives = Primitives()  # noqa: RUF009 - frozen


def qk_norm_backward(
    grad: Float32Array,
    x: Float32Array,
    weight: Float32Array,
    epsilon: float,
    contract: QkNormBackwardContract,
    sums: Float32Array | None = None,
) -> RmsNormGradients:
    """Gradients of the norm of every head.

    Args:
        grad, x: float32, [sequences, tokens, heads, head_dim].
        weight: float32, [head_dim].
        epsilon: as in the forward pass.
        sums: float32, [heads, head_dim], from which the sums of heads go on; None is +0.

    Returns:
        Gradient of ``x``, and the weight's by head, [heads, head_dim]: `merge_heads` makes one of them.

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; epsilon not above zero.
    """
    x = float_array(x, "x", "sequences, tokens, heads, head_dim")
    grad = float_array(grad, "grad", "sequences, tokens, heads, head_dim")
    same_shape(grad, "grad", x, "x")
    weight = float_array(weight, "weight", f"head_dim={x.shape[3]}")
    positive(epsilon, "epsilon")
    total = checked_sums(sums, f"heads={x.shape[2]}, head_dim={x.shape[3]}")
    dx, normal = row_gradients(grad, x, weight, epsilon, contract)
    return RmsNormGradients(dx, row_gradient(grad, normal, contract.partition.rows, total))


def merge_heads(sums: Float32Array, contract: QkNormBackwardContract, ranks: int = 1) -> Float32Array:
    """One rank's share of the weight's gradient, [head_dim], from the sums of its heads [heads, head_dim].

    Several ranks' shares are merged up a tree, rank 0 first.

    Raises:
        TypeError, ValueError: dtype, shape or byte order of ``sums``; segments that the ranks cannot share evenly.
    """
    sums = float_array(sums, "sums", "heads, head_dim")
    segments = rank_segments(sums.shape[0], contract.partition.segments, ranks)
    parts = sums.reshape(segments, -1, sums.shape[1])
    return pairs_tree(np.ascontiguousarray(pairs_tree(np.ascontiguousarray(parts.transpose(0, 2, 1))).T))
