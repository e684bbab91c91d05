"""Sum over ranks: `reference.operators.all_reduce`. The library carries bytes; every rank adds in the same tree."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastpath.backend import note, require_fields, require_tensor
from fastpath.collectives.merge import merge_parts
from reference.contract.base import Contract
from reference.operators.all_reduce import AllReduceContract
from reference.operators.reduce_scatter import ReduceScatterContract


def all_reduce(x: torch.Tensor, contract: AllReduceContract, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum of every rank's ``x``, the same on every rank.

    Args:
        x: float32, [rows, features], one shape on all ranks.
        group: the ranks; None is the default group.

    Returns:
        float32, [rows, features].

    Raises:
        TypeError, ValueError: dtype, shape, layout or device.
        UnsupportedError: a contract without a kernel.
    """
    require_tensor(x, "x", "rows, features", torch.float32)
    require_merge(contract)
    return merge_ranks(gather(x, contract, group), contract)


def gather(x: torch.Tensor, contract: Contract, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Every rank's contiguous ``x`` [rows, ...], rank 0 first: [ranks, rows, ...]. Bytes travel, nothing is added."""
    ranks = dist.get_world_size(group)
    gathered = torch.empty(ranks * x.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(gathered, x, group=group)
    note_transport("all_gather", contract, ranks)
    return gathered.view(ranks, *x.shape)


def merge_ranks(
    partials: torch.Tensor,
    contract: AllReduceContract | ReduceScatterContract,
    output: torch.dtype = torch.float32,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Balanced tree over float32 ``partials`` [ranks, rows, features], rank 0 first; rounded once to ``output``.

    Raises:
        UnsupportedError: a contract without a kernel.
    """
    require_merge(contract)
    out = torch.empty(partials.shape[1:], dtype=output, device=partials.device)
    if out.numel():
        merge_parts(partials, out, bias, contract)
    return out


def require_merge(contract: Contract) -> None:
    """Refuse an order or rounding without a kernel: UnsupportedError."""
    require_fields(contract, {"order.merge": "tree", "rounding.transport": "float32", "rounding.hop": "float32"})


def note_transport(collective: str, contract: Contract, ranks: int) -> None:
    """Record that bytes were carried, which needs no kernel of ours."""
    note(collective, contract, {"ranks": ranks, "adds": False}, b"")
