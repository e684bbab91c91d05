"""Sequential sum: one accumulator, ascending order."""

from __future__ import annotations

from reference.checks import Float32Array
from reference.reductions.step import Step, accumulate_chain, check_row


def chain(x: Float32Array, *, step: Step = "add") -> Float32Array:
    """Accumulate the last axis in ascending order from +0.

    Args:
        x: float32 [..., n], n >= 1.

    Returns:
        float32 [...].

    Raises:
        TypeError, ValueError: as `check_row`.
    """
    return accumulate_chain(check_row(x, step)[..., None], step)[..., 0]
