"""Row sum of a CPU loop: vector registers, several of them in flight, merged at the end."""

from __future__ import annotations

import numpy as np

from reference.checks import Float32Array, require_choice
from reference.reductions.step import Step, accumulate, accumulate_chain, check_row, require_positive, split_last
from reference.reductions.tree import halving_tree, pairs_tree

#: How lanes of one register become one value.
MERGES = ("chain", "halving", "pairs")


def strided_vector(
    x: Float32Array, *, width: int = 16, registers: int = 1, merge: str = "halving", step: Step = "add"
) -> Float32Array:
    """Register r, lane l accumulates x[(i * registers + r) * width + l] over i from +0; then registers, lanes, tail.

    Registers merge in a chain (register 0 first), lanes as `merge` says, and the elements that fill no full round of
    registers are accumulated one by one onto the result.

    Args:
        x: float32 [..., n], n >= 1.
        width: lanes of a register; a power of two for `halving`.
        registers: accumulators in flight.
        merge: `chain` (lane 0 first), `halving` or `pairs`.

    Returns:
        float32 [...].

    Raises:
        TypeError, ValueError: as `check_row`; or a parameter out of range.
    """
    values = check_row(x, step)
    require_positive(width, "width")
    require_positive(registers, "registers")
    require_choice(merge, "merge", MERGES)
    full = values.shape[-1] - values.shape[-1] % (width * registers)
    body = split_last(values[..., :full], registers * width)
    lanes = accumulate_chain(body, step).reshape(*values.shape[:-1], registers, width)
    register = lanes[..., 0, :]
    for r in range(1, registers):
        register = accumulate(register, lanes[..., r, :], "add")
    if merge == "chain":
        total = accumulate_chain(register[..., None], "add")[..., 0]
    else:
        total = halving_tree(register) if merge == "halving" else pairs_tree(register)
    for i in range(full, values.shape[-1]):
        total = accumulate(total, values[..., i], step)
    return np.asarray(total)
