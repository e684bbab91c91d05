"""Sum over fixed blocks in ascending order, each block summed by a tree: how attention meets its keys."""

from __future__ import annotations

from reference.checks import Float32Array
from reference.reductions.step import (
    Step,
    accumulate_chain,
    check_row,
    leaves,
    pad_to_multiple,
    require_power_of_two,
    split_last,
)
from reference.reductions.tree import pairs_tree


def blocked(x: Float32Array, *, block: int = 64, step: Step = "add") -> Float32Array:
    """Tree of adjacent pairs inside each block of `block` elements, then a chain over the blocks from +0.

    A short last block is filled with +0. With `square`, the leaves are x * x with one rounding.

    Args:
        x: float32 [..., n], n >= 1.
        block: a power of two.

    Returns:
        float32 [...].

    Raises:
        TypeError, ValueError: as `check_row`; or `block` is not a power of two.
    """
    values = leaves(check_row(x, step), step)
    require_power_of_two(block, "block")
    padded = pad_to_multiple(values, block)
    sums = pairs_tree(split_last(padded, block))
    return accumulate_chain(sums[..., None], "add")[..., 0]
