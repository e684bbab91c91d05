"""Gradients of a linear projection: matrix products again, of its input and of its weight.

* dx = dy @ W sums over outputs. Of a column-parallel layer ranks share them, so it is a row-parallel product: segments,
  each one chain, and a tree. Of a row-parallel layer every rank has all outputs: one chain.
* dW = dy^T @ x sums over tokens: one chain, sequence after sequence, that goes on from the sums of the micro-batches
  before. Every sequence begins a new step of the matrix unit, so the bits do not depend on how sequences are batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, Value, choice, format_choice
from reference.gradients._sums import ROW_BLOCKS, ROW_WORDS, TOKEN_ORDERS, checked_sums, shared_segments
from reference.operators._arguments import float_array
from reference.operators._numerics import UNIT_NAMES, UNIT_WORDS, narrow, quiet, require_unit, unit_dot, unit_for
from reference.operators.all_reduce import reduce_ranks


@dataclass(frozen=True)
class Domain(Group):
    input: str = format_choice(
        "bfloat16",
        "multiplies float32 operands",
        "multiplies {value} operands, to which it rounds a wider gradient of the output first",
        given=True,
    )


@dataclass(frozen=True)
class Partition(Group):
    segments: int = choice(
        (8, 1, 2, 4, 16), "cuts the outputs into at most {value} equal contiguous segment(s), as many as divide them"
    )
    rows: int = choice(ROW_BLOCKS, ROW_WORDS, equivalent="without a bias no rows are added")


@dataclass(frozen=True)
class Order(Group):
    merge: str = choice(
        ("tree", "chain"),
        {"tree": "merges segments up a balanced tree", "chain": "merges segments one after the other"},
        equivalent="with up to 2 segments a tree is a chain",
    )
    tokens: str = choice(tuple(TOKEN_ORDERS), TOKEN_ORDERS)


@dataclass(frozen=True)
class Rounding(Group):
    input: str = format_choice("bfloat16", "rounds the gradient of the input to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    unit: str = choice(UNIT_NAMES, UNIT_WORDS)


@dataclass(frozen=True)
class LinearBackwardContract(Contract):
    """dx[t, k] = sum over n of dy[t, n] * weight[n, k];  dweight[n, k] = sum over t of dy[t, n] * x[t, k]
    dbias[n] = sum over t of dy[t, n]"""

    operator: ClassVar[str] = "linear_backward"
    domain: Domain = Domain()
    partition: Partition = Partition()
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        if self.partition.segments == 1 and self.order.merge != "tree":
            raise ValueError(f"{self.operator}: order.merge must stay 'tree' with 1 segment: nothing is merged")
        require_unit(self.primitives.unit, self.domain.input, self.operator)

    def dtype_changes(self, dtype: str) -> dict[str, Value]:
        return super().dtype_changes(dtype) | {"primitives.unit": unit_for(self.primitives.unit, dtype)}


def linear_input_gradient(
    grad: Float32Array, weight: Float32Array, contract: LinearBackwardContract, *, joined: int = 1
) -> Float32Array:
    """Gradient of the input on one rank.

    Args:
        grad: float32, [tokens, outputs].
        weight: float32, [outputs, inputs].
        joined: how many projections the weight holds one below the other (2: gate and up). A segment then is the
            same part of each, so that ranks, which hold a part of each, hold whole segments.

    Returns:
        float32, [tokens, inputs].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; a value outside the contract's input format;
            outputs that ``joined`` does not divide.
    """
    return linear_input_merge([linear_input_partial(grad, weight, contract, 1, joined=joined)], contract)


def linear_input_partial(
    grad: Float32Array, weight: Float32Array, contract: LinearBackwardContract, ranks: int, *, joined: int = 1
) -> Float32Array:
    """One rank's share of the gradient of the input, float32, not rounded: [tokens, inputs].

    Args:
        grad: float32, [tokens, outputs / ranks], and ``weight``: float32, [outputs / ranks, inputs]: the rank's.

    Raises:
        TypeError, ValueError: as `linear_input_gradient`; segments that the ranks cannot share evenly.
    """
    grad = float_array(grad, "grad", "tokens, outputs")
    weight = float_array(weight, "weight", f"outputs={grad.shape[1]}, inputs")
    segments = rank_segments(grad.shape[1], contract.partition.segments, ranks, joined)
    width = grad.shape[1] // (segments * joined)
    dy = narrow(grad, contract.domain.input)
    unit, fmt = contract.primitives.unit, contract.domain.input
    parts = []
    for segment in range(segments):
        total: Float32Array | None = None
        for projection in range(joined):
            first = (projection * segments + segment) * width
            here = slice(first, first + width)
            total = unit_dot(dy[:, here], weight[here], total, unit, fmt, ("grad", "weight"))
        assert total is not None
        parts.append(total)
    return reduce_ranks(parts, contract.order.merge, "float32", "float32")


def linear_input_merge(partials: Sequence[Float32Array], contract: LinearBackwardContract) -> Float32Array:
    """All ranks' shares ([tokens, inputs] each, rank 0 first), merged and rounded."""
    return narrow(reduce_ranks(partials, contract.order.merge, "float32", "float32"), contract.rounding.input)


def rank_segments(outputs: int, most: int, ranks: int, joined: int = 1) -> int:
    """Segments that one of ``ranks`` ranks with ``outputs`` of ``joined`` projections holds.

    Raises:
        ValueError: outputs that do not divide; segments that the ranks cannot share evenly.
    """
    if ranks < 1 or joined < 1 or outputs % joined or not outputs:
        raise ValueError(f"grad: {outputs} outputs are not those of {joined} equal projections")
    segments = shared_segments(outputs // joined * ranks, most)
    if most > 1 and (ranks > segments or segments % ranks):
        raise ValueError(f"ranks: {segments} segments cannot be shared evenly by {ranks} ranks")
    return max(1, segments // ranks)


@quiet()
def linear_weight_gradient(
    grad: Float32Array, x: Float32Array, contract: LinearBackwardContract, sums: Float32Array | None = None
) -> Float32Array:
    """Gradient of the weight.

    Args:
        grad: float32, [sequences, tokens, outputs].
        x: float32, [sequences, tokens, inputs].
        sums: float32, [outputs, inputs]: the chain goes on from them; None is +0.

    Returns:
        float32, [outputs, inputs], not rounded. Tokens at the end of a sequence whose gradients are zero change no
        bit, except the sign of a sum that has underflowed to -0.

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; a value outside the contract's input format.
    """
    grad = float_array(grad, "grad", "sequences, tokens, outputs")
    x = float_array(x, "x", f"sequences={grad.shape[0]}, tokens={grad.shape[1]}, inputs")
    total = checked_sums(sums, f"outputs={grad.shape[2]}, inputs={x.shape[2]}")
    if total is None:
        total = np.zeros((grad.shape[2], x.shape[2]), np.float32)
    unit, fmt, order = contract.primitives.unit, contract.domain.input, contract.order.tokens
    for dy, rows in zip(narrow(grad, fmt), x, strict=True):
        step = slice(None) if order == "ascending" else slice(None, None, -1)
        total = unit_dot(np.ascontiguousarray(dy[step].T), rows[step], total, unit, fmt, ("grad", "x"))
    return total
