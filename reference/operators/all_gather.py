"""Concatenation of the ranks' shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, format_choice
from reference.operators._numerics import narrow
from reference.operators.all_reduce import rank_arrays


@dataclass(frozen=True)
class Rounding(Group):
    transport: str = format_choice(
        "float32", "sends shards as they are", "rounds shards to {value} before they are sent"
    )


@dataclass(frozen=True)
class AllGatherContract(Contract):
    """y = x[rank 0], x[rank 1], ... side by side along the last axis, the same on every rank"""

    operator: ClassVar[str] = "all_gather"
    rounding: Rounding = Rounding()


def all_gather(shards: Sequence[Float32Array], contract: AllGatherContract) -> Float32Array:
    """The shards (float32, one per rank, one shape [..., features]) concatenated along the last axis.

    Raises:
        TypeError, ValueError: no shards; dtype, byte order or shape of one.
    """
    ranks = rank_arrays(shards, "shards")
    return np.concatenate([narrow(rank, contract.rounding.transport) for rank in ranks], axis=-1)
