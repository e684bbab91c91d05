"""Row sum of a GPU thread block: strided accumulation per thread, a shuffle tree per warp, then over the warps."""

from __future__ import annotations

import numpy as np

from reference.checks import Float32Array
from reference.reductions.step import (
    Step,
    accumulate_chain,
    check_row,
    pad_to_multiple,
    require_positive,
    require_power_of_two,
    split_last,
)
from reference.reductions.tree import halving_tree


def warp_shuffle(
    x: Float32Array, *, warp: int = 32, warps: int = 8, vector: int = 1, step: Step = "add"
) -> Float32Array:
    """Sum as CUDA (`warp=32`) and gfx942 wavefronts (`warp=64`) do with xor or down shuffles.

    Thread t of the warp * warps threads accumulates, from +0 and in ascending order, the elements of vectors t,
    t + threads, ...; each vector holds `vector` consecutive elements. Lanes of a warp merge with offsets warp/2 .. 1;
    the warps' sums, filled with +0 to a full warp, merge in the same way.

    Args:
        x: float32 [..., n], n >= 1.
        warp: lanes of a warp, a power of two.
        warps: warps of the block, at most `warp`.
        vector: elements of one load.

    Returns:
        float32 [...].

    Raises:
        TypeError, ValueError: as `check_row`; or a parameter out of range.
    """
    values = check_row(x, step)
    require_power_of_two(warp, "warp")
    require_positive(warps, "warps")
    require_positive(vector, "vector")
    if warps > warp:
        raise ValueError(f"warps: {warps} exceeds the {warp} lanes that merge them")
    threads = warp * warps
    rounds = split_last(pad_to_multiple(values, threads * vector), threads, vector)
    # each thread's elements in its own order: round, then place in the vector
    per_thread = np.moveaxis(rounds, -1, -2).reshape(*values.shape[:-1], rounds.shape[-3] * vector, threads)
    lane_sums = accumulate_chain(per_thread, step).reshape(*values.shape[:-1], warps, warp)
    return halving_tree(pad_to_multiple(halving_tree(lane_sums), warp))
