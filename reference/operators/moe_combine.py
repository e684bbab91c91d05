"""Weighted sum of what the chosen experts returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array
from reference.operators._numerics import narrow, quiet


@dataclass(frozen=True)
class Order(Group):
    experts: str = choice(
        ("expert_index", "rank"),
        {
            "expert_index": "adds experts by ascending index",
            "rank": "adds experts by descending weight, as the router returned them",
        },
        equivalent="with up to 2 experts per token and separate rounding the sum commutes",
    )


@dataclass(frozen=True)
class Rounding(Group):
    product: str = format_choice(
        "float32", "keeps weighted outputs in float32", "rounds each weighted output to {value}"
    )
    output: str = format_choice("bfloat16", "rounds the sum to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    accumulate: str = choice(
        ("fma", "mul_add"), {"fma": "accumulates by FMA", "mul_add": "rounds each weighted output before it is added"}
    )


@dataclass(frozen=True)
class MoeCombineContract(Contract):
    """y[t] = sum over chosen experts e of weight[t, e] * output[t, e], from zero"""

    operator: ClassVar[str] = "moe_combine"
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        if self.primitives.accumulate == "fma" and self.rounding.product != "float32":
            raise ValueError("moe_combine: rounding.product must be float32 where primitives.accumulate is 'fma'")


@quiet()
def moe_combine(
    outputs: Float32Array, weights: Float32Array, experts: NDArray[Any], contract: MoeCombineContract
) -> Float32Array:
    """One output per token.

    Args:
        outputs: float32, [tokens, k, hidden]: what the chosen experts returned.
        weights: float32, [tokens, k].
        experts: integers, [tokens, k]: their indices.

    Returns:
        float32, [tokens, hidden].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument.
    """
    outputs = float_array(outputs, "outputs", "tokens, k, hidden")
    tokens, k, hidden = outputs.shape
    weights = float_array(weights, "weights", f"tokens={tokens}, k={k}")
    if not isinstance(experts, np.ndarray) or experts.dtype.kind not in "iu":
        raise TypeError(f"experts: expected a NumPy array of integers, got {getattr(experts, 'dtype', type(experts))}")
    if experts.shape != weights.shape:
        raise ValueError(f"experts: shape {list(experts.shape)} differs from weights {list(weights.shape)}")
    if contract.order.experts == "expert_index":
        order = np.argsort(experts, axis=1, kind="stable")
        outputs = np.take_along_axis(outputs, order[:, :, None], axis=1)
        weights = np.take_along_axis(weights, order, axis=1)
    total = np.zeros((tokens, hidden), np.float32)
    for i in range(k):
        y, w = outputs[:, i], weights[:, i, None]
        if contract.primitives.accumulate == "fma":
            total = fused_multiply_add(y, np.broadcast_to(w, y.shape), total)
        else:
            total = total + narrow(y * w, contract.rounding.product)
    return narrow(total, contract.rounding.output)
