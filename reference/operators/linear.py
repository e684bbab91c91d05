"""Linear projection, whole or column parallel: outputs are independent, so a rank calls it with its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, Value, choice, format_choice
from reference.operators._arguments import float_array
from reference.operators._numerics import (
    K_ORDERS,
    UNIT_NAMES,
    UNIT_WORDS,
    k_order,
    narrow,
    quiet,
    require_unit,
    unit_dot,
    unit_for,
)
from reference.operators.all_reduce import reduce_ranks


@dataclass(frozen=True)
class Domain(Group):
    input: str = format_choice(
        "bfloat16",
        "multiplies float32 operands",
        "multiplies {value} operands",
        equivalent="operands outside the format are refused; only a matrix unit that treats formats apart can differ",
        given=True,
    )


OPERANDS = ("x", "weight")

BLOCKS = (64, 128, 192, 256, 384, 512, 1024)
BLOCK_K: int = choice(
    (0, *BLOCKS),
    {
        0: "runs one chain through a segment",
        **{n: f"restarts the chain every {n} elements of K and adds the pieces in order" for n in BLOCKS},
    },
)


@dataclass(frozen=True)
class Partition(Group):
    segments: int = choice((1, 2, 4, 8, 16), "cuts K into {value} equal contiguous segment(s)")
    block_k: int = BLOCK_K


@dataclass(frozen=True)
class Order(Group):
    k: str = choice(tuple(K_ORDERS), K_ORDERS)
    merge: str = choice(
        ("tree", "chain"),
        {
            "tree": "merges segments up a balanced tree",
            "chain": "merges segments one after the other",
        },
        equivalent="with up to 2 segments a tree is a chain",
    )
    bias: str = choice(
        ("before_rounding", "after_rounding", "in_accumulator"),
        {
            "before_rounding": "adds the bias to the float32 sum",
            "after_rounding": "adds the bias to the rounded product and rounds again",
            "in_accumulator": "starts the first chain from the bias",
        },
        equivalent="without a bias the place of its addition does not matter",
    )


@dataclass(frozen=True)
class Rounding(Group):
    partial: str = format_choice(
        "float32", "keeps segment sums in float32", "rounds segment sums to {value} before it merges them"
    )
    output: str = format_choice("bfloat16", "rounds the output to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    unit: str = choice(UNIT_NAMES, UNIT_WORDS)


@dataclass(frozen=True)
class LinearContract(Contract):
    """y[t, n] = sum over k of x[t, k] * weight[n, k]  (+ bias[n])"""

    operator: ClassVar[str] = "linear"
    domain: Domain = Domain()
    partition: Partition = Partition()
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        if self.partition.segments == 1:
            if self.order.merge != "tree":
                raise ValueError(f"{self.operator}: order.merge must stay 'tree' with 1 segment: nothing is merged")
            if self.rounding.partial != "float32":
                raise ValueError(
                    f"{self.operator}: rounding.partial must stay 'float32' with 1 segment: nothing is merged"
                )
        require_unit(self.primitives.unit, self.domain.input, self.operator)

    def dtype_changes(self, dtype: str) -> dict[str, Value]:
        return super().dtype_changes(dtype) | {"primitives.unit": unit_for(self.primitives.unit, dtype)}


def linear(
    x: Float32Array, weight: Float32Array, contract: LinearContract, bias: Float32Array | None = None
) -> Float32Array:
    """The projection of every row of ``x``.

    Args:
        x: float32, [tokens, inputs].
        weight: float32, [outputs, inputs] (the layout of checkpoints).
        bias: float32, [outputs].

    Returns:
        float32, [tokens, outputs].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; a value outside the contract's input format;
            inputs not a multiple of the number of segments.
    """
    return finish(segment_sum(x, weight, contract, contract.partition.segments, bias), contract, bias)


def segment_sum(
    x: Float32Array, weight: Float32Array, contract: LinearContract, segments: int, bias: Float32Array | None = None
) -> Float32Array:
    """The float32 sum over k in ``segments`` segments, not rounded; the bias is in it only if the sum starts there."""
    x = float_array(x, "x", "tokens, inputs")
    inputs = x.shape[1]
    weight = float_array(weight, "weight", f"outputs, inputs={inputs}")
    if inputs == 0 or inputs % segments:
        raise ValueError(f"x: {inputs} inputs cannot be cut into {segments} equal segments")
    start = None
    if bias is not None:
        bias = float_array(bias, "bias", f"outputs={weight.shape[0]}")
        if contract.order.bias == "in_accumulator":
            start = np.broadcast_to(bias, (x.shape[0], weight.shape[0]))
    width = inputs // segments
    parts = []
    with quiet():
        for k in range(0, inputs, width):
            parts.append(_chain(x[:, k : k + width], weight[:, k : k + width].T, start, contract))
            start = None
        return reduce_ranks(parts, contract.order.merge, contract.rounding.partial, "float32")


@quiet()
def finish(total: Float32Array, contract: LinearContract, bias: Float32Array | None) -> Float32Array:
    """Bias and output rounding."""
    output = contract.rounding.output
    if bias is None or contract.order.bias == "in_accumulator":
        return narrow(total, output)
    if contract.order.bias == "after_rounding":
        return narrow(narrow(total, output) + bias, output)
    return narrow(total + bias, output)


def _chain(a: Float32Array, b: Float32Array, start: Float32Array | None, contract: LinearContract) -> Float32Array:
    """One segment's sum over k, from ``start`` or zero: a [tokens, k], b [k, outputs]."""
    size = a.shape[1]
    order = k_order(size, contract.order.k)
    a, b = a[:, order], b[order]
    block = contract.partition.block_k or size
    unit, fmt = contract.primitives.unit, contract.domain.input
    total = unit_dot(a[:, :block], b[:block], start, unit, fmt, OPERANDS)
    for k in range(block, size, block):
        total = total + unit_dot(a[:, k : k + block], b[k : k + block], None, unit, fmt, OPERANDS)
    return total
