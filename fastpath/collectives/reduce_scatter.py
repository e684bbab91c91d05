"""Sum over ranks of which each keeps one chunk of rows: `reference.operators.reduce_scatter`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastpath.backend import require_tensor
from fastpath.collectives.all_reduce import merge_ranks, note_transport, require_merge
from reference.operators.reduce_scatter import ReduceScatterContract


def reduce_scatter(
    x: torch.Tensor, contract: ReduceScatterContract, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """This rank's chunk, along the first axis, of the sum of every rank's ``x``.

    Args:
        x: float32, [rows, features], one shape on all ranks; rows a multiple of the number of ranks.

    Returns:
        float32, [rows / ranks, features].

    Raises:
        TypeError, ValueError: dtype, shape, layout or device; rows not a multiple of the ranks.
        UnsupportedError: a contract without a kernel.
    """
    require_tensor(x, "x", "rows, features", torch.float32)
    require_merge(contract)
    ranks = dist.get_world_size(group)
    rows, features = x.shape
    if rows % ranks:
        raise ValueError(f"x: {rows} rows cannot be cut into {ranks} equal chunks")
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    note_transport("all_to_all", contract, ranks)
    return merge_ranks(received.view(ranks, rows // ranks, features), contract)
