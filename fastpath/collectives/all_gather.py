"""Concatenation of the ranks' shards along the last axis: `reference.operators.all_gather`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastpath.backend import DTYPES, require_fields, require_tensor
from fastpath.collectives.all_reduce import gather
from reference.operators.all_gather import AllGatherContract


def all_gather(x: torch.Tensor, contract: AllGatherContract, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Every rank's ``x`` side by side, rank 0 first, the same on every rank.

    Args:
        x: bfloat16 or float32, [rows, features], one shape on all ranks.

    Returns:
        [rows, ranks * features], of x's dtype.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device.
        UnsupportedError: a contract that rounds.
    """
    require_tensor(x, "x", "rows, features", *DTYPES.values())
    require_fields(contract, {"rounding.transport": "float32"})
    return concatenate(gather(x, contract, group))


def concatenate(shards: torch.Tensor) -> torch.Tensor:
    """[ranks, rows, features] as [rows, ranks * features]."""
    ranks, rows, features = shards.shape
    return shards.transpose(0, 1).reshape(rows, ranks * features)
