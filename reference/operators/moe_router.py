"""Choice of experts for each token (specification only: no supported model uses it yet)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array
from reference.operators._numerics import EXPS, ROW_ORDERS, exp, narrow, quiet, row_order_words, row_sum
from reference.operators.logsumexp import row_maximum


@dataclass(frozen=True)
class Order(Group):
    softmax: str = choice(
        ("before_top_k", "after_top_k"),
        {
            "before_top_k": "takes the softmax over all experts, then the top k",
            "after_top_k": "takes the top k, then the softmax over them",
        },
    )
    renormalise: bool = choice(
        (True, False),
        {True: "divides the chosen weights by their sum", False: "leaves the chosen weights as they are"},
    )
    sum: str = choice(ROW_ORDERS, row_order_words("adds"))


@dataclass(frozen=True)
class Rounding(Group):
    logits: str = format_choice("float32", "takes router logits as they are", "rounds router logits to {value} first")
    weights: str = format_choice("float32", "returns float32 weights", "rounds weights to {value}")


@dataclass(frozen=True)
class Primitives(Group):
    exp: str = choice(EXPS, "computes exp as {value}")


@dataclass(frozen=True)
class MoeRouterContract(Contract):
    """p = softmax(x) over experts;  experts = the k largest, of equal ones the lowest index first;  w = p[experts]"""

    operator: ClassVar[str] = "moe_router"
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        if self.order.softmax == "after_top_k" and not self.order.renormalise:
            raise ValueError("moe_router: order.renormalise must stay true where order.softmax is 'after_top_k'")


class MoeRouterResult(NamedTuple):
    """``experts``, int64, and ``weights``, float32, [tokens, k] each, the largest weight first."""

    experts: NDArray[np.int64]
    weights: Float32Array


@quiet()
def moe_router(logits: Float32Array, k: int, contract: MoeRouterContract) -> MoeRouterResult:
    """The ``k`` experts of each token and their weights.

    Args:
        logits: float32, [tokens, experts].
        k: experts per token, 1 to the number of experts.

    Raises:
        TypeError, ValueError: dtype, shape or byte order; k out of range; a NaN logit (it has no rank).
    """
    logits = float_array(logits, "logits", "tokens, experts")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k: must be 1 to {logits.shape[1]}, the number of experts, got {k}")
    if np.isnan(logits).any():
        raise ValueError("logits: NaN has no rank among experts")
    logits = narrow(logits, contract.rounding.logits)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    maximum = row_maximum(logits)[:, None]
    chosen = exp(np.take_along_axis(logits, experts, axis=1) - maximum, contract.primitives.exp)
    if contract.order.softmax == "before_top_k":
        everything = row_sum(exp(logits - maximum, contract.primitives.exp), contract.order.sum)
        chosen = chosen / everything[:, None]
    if contract.order.renormalise:
        chosen = chosen / row_sum(chosen, contract.order.sum)[:, None]
    return MoeRouterResult(experts, narrow(chosen, contract.rounding.weights))
