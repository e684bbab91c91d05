"""Row-parallel linear projection: `reference.operators.row_linear`. The bits do not depend on the number of ranks."""

from __future__ import annotations

import torch

from fastpath.backend import DTYPES, require_tensor
from fastpath.collectives.all_reduce import merge_ranks
from fastpath.products.linear import linear
from fastpath.products.matmul import product, require_contract, require_operands
from fastpath.products.schedules import Schedule
from reference.operators.all_reduce import AllReduceContract
from reference.operators.row_linear import RowLinearContract


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    contract: RowLinearContract,
    bias: torch.Tensor | None = None,
    plan: Schedule | None = None,
) -> torch.Tensor:
    """The projection on one rank: arguments, result and errors as :func:`fastpath.products.linear.linear`."""
    return linear(x, weight, contract, bias, plan)


def row_linear_partial(
    x: torch.Tensor, weight: torch.Tensor, contract: RowLinearContract, ranks: int, plan: Schedule | None = None
) -> torch.Tensor:
    """One rank's share of the sum, before the all-reduce.

    Args:
        x: [tokens, inputs / ranks], of the contract's ``domain.input``: the rank's columns.
        weight: [outputs, inputs / ranks], likewise.
        ranks: number of ranks; each owns segments / ranks neighbouring segments.

    Returns:
        float32, [tokens, outputs], not rounded.

    Raises:
        TypeError, ValueError, UnsupportedError: as :func:`row_linear`; segments that the ranks cannot share evenly.
    """
    segments = contract.partition.segments
    if ranks < 1 or (segments > ranks and segments % ranks):
        raise ValueError(f"ranks: {segments} segments cannot be shared evenly by {ranks} ranks")
    require_contract(contract, None)
    require_operands(x, weight, contract, None)
    return product(x, weight, contract, max(1, segments // ranks), torch.float32, None, plan)


def row_linear_merge(
    partials: torch.Tensor,
    contract: RowLinearContract,
    reduction: AllReduceContract,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The ranks' partials, gathered, as the layer's output.

    Args:
        partials: float32, [ranks, tokens, outputs], rank 0 first.
        bias: [outputs].

    Returns:
        [tokens, outputs], of the contract's ``rounding.output``.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device.
        UnsupportedError: a contract without a kernel.
    """
    require_contract(contract, bias)
    require_tensor(partials, "partials", "ranks, tokens, outputs", torch.float32)
    if bias is not None:
        require_tensor(bias, "bias", f"outputs={partials.shape[2]}", *DTYPES.values())
    return merge_ranks(partials, reduction, DTYPES[contract.rounding.output], bias)
