"""Row sum of the portable contract: a fixed number of lanes, then a tree of adjacent pairs over them."""

from __future__ import annotations

from reference.checks import Float32Array
from reference.reductions.step import (
    Step,
    accumulate_chain,
    check_row,
    pad_to_multiple,
    require_power_of_two,
    split_last,
)
from reference.reductions.tree import pairs_tree


def lanes_tree(x: Float32Array, *, lanes: int = 256, step: Step = "add") -> Float32Array:
    """Lane l accumulates x[l], x[l + lanes], ... from +0; adjacent lanes then merge in a balanced tree.

    A row shorter than `lanes` uses the largest power of two that is not above its length.

    Args:
        x: float32 [..., n], n >= 1.
        lanes: a power of two.

    Returns:
        float32 [...].

    Raises:
        TypeError, ValueError: as `check_row`; or `lanes` is not a power of two.
    """
    values = check_row(x, step)
    require_power_of_two(lanes, "lanes")
    width = min(lanes, 1 << (values.shape[-1].bit_length() - 1))
    padded = pad_to_multiple(values, width)
    return pairs_tree(accumulate_chain(split_last(padded, width), step))
