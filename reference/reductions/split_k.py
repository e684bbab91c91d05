"""Sum over n contiguous splits, as split-K kernels and their reduction pass do."""

from __future__ import annotations

import numpy as np

from reference.checks import Float32Array, require_choice
from reference.reductions.step import Step, accumulate_chain, check_row, require_positive
from reference.reductions.tree import pairs_tree

MERGES = ("chain", "pairs")


def split_k(x: Float32Array, *, splits: int = 2, merge: str = "chain", step: Step = "add") -> Float32Array:
    """Chain inside each of `splits` contiguous parts of ceil(n / splits) elements; then merge the parts.

    The last part may be shorter or empty; an empty part adds +0.

    Args:
        x: float32 [..., n], n >= 1.
        merge: `chain` (first split first, from +0) or `pairs`.

    Returns:
        float32 [...].

    Raises:
        TypeError, ValueError: as `check_row`; or a parameter out of range.
    """
    values = check_row(x, step)
    require_positive(splits, "splits")
    require_choice(merge, "merge", MERGES)
    length = -(-values.shape[-1] // splits)
    padded = np.zeros((*values.shape[:-1], splits * length), np.float32)
    padded[..., : values.shape[-1]] = values
    parts = accumulate_chain(padded.reshape(*values.shape[:-1], splits, length)[..., None], step)[..., 0]
    return pairs_tree(parts) if merge == "pairs" else accumulate_chain(parts[..., None], "add")[..., 0]
