"""Sum of one partial result per rank, in an order that the contract fixes; the transport itself never adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.checks import Float32Array, require_float32
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import same_shape
from reference.operators._numerics import narrow, quiet


@dataclass(frozen=True)
class Order(Group):
    merge: str = choice(
        ("tree", "chain", "ring"),
        {
            "tree": "adds neighbours pairwise, then the pairs, up a balanced tree over ranks",
            "chain": "adds the ranks one after the other, rank 0 first",
            "ring": "adds chunk c of the last axis starting at rank c + 1 and going round the ring",
        },
        equivalent="with 2 ranks every order is the same sum: a + b commutes",
    )


@dataclass(frozen=True)
class Rounding(Group):
    transport: str = format_choice(
        "float32", "sends float32 partials", "rounds each rank's partial to {value} before it is sent"
    )
    hop: str = format_choice("float32", "keeps sums of partials in float32", "rounds to {value} after every addition")


@dataclass(frozen=True)
class AllReduceContract(Contract):
    """y = sum over ranks of x[rank], the same on every rank"""

    operator: ClassVar[str] = "all_reduce"
    order: Order = Order()
    rounding: Rounding = Rounding()


def all_reduce(partials: Sequence[Float32Array], contract: AllReduceContract) -> Float32Array:
    """The sum that every rank holds afterwards.

    Args:
        partials: float32, one array per rank, rank 0 first, all of one shape [..., features].

    Raises:
        TypeError, ValueError: no partials; dtype, byte order or shape of one.
    """
    ranks = rank_arrays(partials, "partials")
    return reduce_ranks(ranks, contract.order.merge, contract.rounding.transport, contract.rounding.hop)


@quiet()
def reduce_ranks(ranks: Sequence[Float32Array], merge: str, transport: str, hop: str) -> Float32Array:
    """The reduction shared with reduce_scatter. Arguments are not checked."""
    sent = [narrow(rank, transport) for rank in ranks]
    if merge == "chain":
        return _chain(sent, hop)
    if merge == "ring":
        size = len(sent)
        chunks = [np.array_split(rank, size, axis=-1) for rank in sent]
        ring = [_chain([chunks[(c + 1 + step) % size][c] for step in range(size)], hop) for c in range(size)]
        return np.concatenate(ring, axis=-1)
    while len(sent) > 1:
        pairs = [narrow(left + right, hop) for left, right in zip(sent[::2], sent[1::2], strict=False)]
        sent = pairs + sent[len(pairs) * 2 :]
    return sent[0]


def _chain(parts: Sequence[Float32Array], hop: str) -> Float32Array:
    total = parts[0]
    for part in parts[1:]:
        total = narrow(total + part, hop)
    return total


def rank_arrays(arrays: Sequence[Float32Array], argument: str) -> list[Float32Array]:
    """The arrays of all ranks, checked: at least one, native float32, one shape with at least one axis."""
    if not arrays:
        raise ValueError(f"{argument}: expected one array per rank, got none")
    checked = [require_float32(array, f"{argument}[{rank}]") for rank, array in enumerate(arrays)]
    if checked[0].ndim == 0:
        raise ValueError(f"{argument}[0]: expected at least one axis, got a scalar")
    for rank, array in enumerate(checked[1:], 1):
        same_shape(array, f"{argument}[{rank}]", checked[0], f"{argument}[0]")
    return checked
