"""Row-parallel linear projection: ranks share the reduction axis, and the bits do not depend on how many they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from reference.checks import Float32Array
from reference.contract.base import Group, choice
from reference.operators.all_reduce import AllReduceContract, all_reduce
from reference.operators.linear import BLOCK_K, LinearContract, finish, linear, segment_sum


@dataclass(frozen=True)
class Partition(Group):
    segments: int = choice(
        (8, 1, 2, 4, 16),
        "cuts K into {value} equal contiguous segment(s), which ranks share in order",
    )
    block_k: int = BLOCK_K


@dataclass(frozen=True)
class RowLinearContract(LinearContract):
    """y[t, n] = sum over ranks, segments and k of x[t, k] * weight[n, k]  (+ bias[n])
    A rank owns segments / ranks neighbouring segments: with a tree over both, it owns a subtree."""

    operator: ClassVar[str] = "row_linear"
    partition: Partition = Partition()  # type: ignore[assignment]


def row_linear(
    x: Float32Array, weight: Float32Array, contract: RowLinearContract, bias: Float32Array | None = None
) -> Float32Array:
    """The projection on one rank: as :func:`reference.operators.linear.linear`."""
    return linear(x, weight, contract, bias)


def row_linear_partial(
    x: Float32Array,
    weight: Float32Array,
    contract: RowLinearContract,
    ranks: int,
    bias: Float32Array | None = None,
) -> Float32Array:
    """One rank's share of the sum, float32, before the all-reduce.

    Args:
        x: float32, [tokens, inputs / ranks]: the rank's columns.
        weight: float32, [outputs, inputs / ranks]: the rank's columns.
        ranks: number of ranks. Where it exceeds the contract's segments, each rank is a segment.
        bias: float32, [outputs]; give it to rank 0 alone. It is used if the contract starts the accumulator from it.

    Returns:
        float32, [tokens, outputs].

    Raises:
        TypeError, ValueError: as :func:`row_linear`; segments that the ranks cannot share evenly.
    """
    segments = contract.partition.segments
    if ranks < 1 or (segments > ranks and segments % ranks):
        raise ValueError(f"ranks: {segments} segments cannot be shared evenly by {ranks} ranks")
    return segment_sum(x, weight, contract, max(1, segments // ranks), bias)


def row_linear_merge(
    partials: Sequence[Float32Array],
    contract: RowLinearContract,
    reduction: AllReduceContract,
    bias: Float32Array | None = None,
) -> Float32Array:
    """All-reduce of the ranks' partials ([tokens, outputs] each, rank 0 first), then bias and output rounding."""
    total = partials[0] if len(partials) == 1 else all_reduce(partials, reduction)
    return finish(total, contract, bias)
