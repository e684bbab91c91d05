"""Sum over ranks of which each rank keeps one chunk (sequence parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.checks import Float32Array
from reference.contract.base import Contract
from reference.operators.all_reduce import Order, Rounding, rank_arrays, reduce_ranks


@dataclass(frozen=True)
class ReduceScatterContract(Contract):
    """y[rank] = chunk number rank of the first axis of (sum over ranks of x)"""

    operator: ClassVar[str] = "reduce_scatter"
    order: Order = Order()  # noqa: RUF009 - frozen
    rounding: Rounding = Rounding()  # noqa: RUF009 - frozen


def reduce_scatter(partials: Sequence[Float32Array], contract: ReduceScatterContract) -> list[Float32Array]:
    """One chunk per rank of the sum, cut along the first axis.

    Args:
        partials: float32, one per rank, one shape [rows, ...]; rows a multiple of the number of ranks.

    Returns:
        float32, one array [rows / ranks, ...] per rank.

    Raises:
        TypeError, ValueError: no partials; dtype, byte order or shape of one; rows not a multiple of the ranks.
    """
    ranks = rank_arrays(partials, "partials")
    rows = ranks[0].shape[0]
    if rows % len(ranks):
        raise ValueError(f"partials: {rows} rows cannot be cut into {len(ranks)} equal chunks")
    total = reduce_ranks(ranks, contract.order.merge, contract.rounding.transport, contract.rounding.hop)
    return np.split(total, len(ranks))
