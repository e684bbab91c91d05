"""Sum over equal contiguous segments, merged in a balanced tree: the order that tensor parallelism can keep."""

from __future__ import annotations

from reference.checks import Float32Array
from reference.reductions.lanes_tree import lanes_tree
from reference.reductions.step import Step, accumulate_chain, check_row, require_positive
from reference.reductions.tree import pairs_tree


def segments_tree(x: Float32Array, *, segments: int = 8, lanes: int | None = None, step: Step = "add") -> Float32Array:
    """Sum each of `segments` equal contiguous segments, then merge adjacent segments in a balanced tree.

    For 8 segments any tensor-parallel size in {1, 2, 4, 8} gives the same bits: a rank owns a subtree.

    Args:
        x: float32 [..., n], n a multiple of `segments`.
        lanes: inside a segment, the width of `lanes_tree`; None for a chain.

    Returns:
        float32 [...].

    Raises:
        TypeError, ValueError: as `check_row`; or n is not a multiple of `segments`.
    """
    values = check_row(x, step)
    require_positive(segments, "segments")
    if values.shape[-1] % segments:
        raise ValueError(f"segments: {segments} does not divide the {values.shape[-1]} elements of the last axis")
    parts = values.reshape(*values.shape[:-1], segments, values.shape[-1] // segments)
    if lanes is not None:
        return pairs_tree(lanes_tree(parts, lanes=lanes, step=step))
    return pairs_tree(accumulate_chain(parts[..., None], step)[..., 0])
