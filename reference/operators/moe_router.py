"""Choice of experts for each token: scores from the router's logits, the k best of them, and what each one weighs.

Two engines that add a router's product in different orders disagree in the last bits of the logits, and where two
experts are that near to each other, in the choice: every later difference of the token is then large. So the tie rule,
what is ranked, and the formats before the choice are fields.
"""

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
    rank: str = choice(
        ("logits", "scores"),
        {
            "logits": "ranks experts by their logits",
            "scores": "ranks experts by the rounded softmax, in which logits that differ can tie",
        },
        equivalent="the softmax keeps the order of logits that lie further apart than its own rounding",
        added=True,
    )
    ties: str = choice(
        ("lowest_index", "highest_index"),
        {
            "lowest_index": "of equal experts takes the one with the lowest index first",
            "highest_index": "of equal experts takes the one with the highest index first",
        },
        equivalent="no two experts of a token are equal",
        added=True,
    )
    bias: str = choice(
        ("choice", "choice_and_weight"),
        {
            "choice": "adds the correction bias for the choice alone",
            "choice_and_weight": "lets the correction bias into the weights too",
        },
        equivalent="the model has no correction bias",
        added=True,
    )


@dataclass(frozen=True)
class Rounding(Group):
    logits: str = format_choice("float32", "takes router logits as they are", "rounds router logits to {value} first")
    weights: str = format_choice("float32", "returns float32 weights", "rounds weights to {value}")
    scores: str = format_choice(
        "float32", "keeps the softmax in float32", "rounds the softmax to {value} before the top k", added=True
    )
    bias: str = format_choice(
        "float32",
        "adds the correction bias in float32",
        "rounds the correction bias to {value}",
        equivalent="the model has no correction bias",
        added=True,
    )


@dataclass(frozen=True)
class Primitives(Group):
    exp: str = choice(EXPS, "computes exp as {value}")


@dataclass(frozen=True)
class MoeRouterContract(Contract):
    """p = softmax(x) over experts;  experts = the k largest of x or p (+ bias);  w = p[experts] (/ their sum)"""

    operator: ClassVar[str] = "moe_router"
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        if self.order.softmax == "after_top_k" and not self.order.renormalise:
            raise ValueError("moe_router: order.renormalise must stay true where order.softmax is 'after_top_k'")
        if self.order.softmax == "after_top_k" and (self.order.rank, self.rounding.scores) != ("logits", "float32"):
            raise ValueError(
                "moe_router: order.rank and rounding.scores are of a softmax before the top k; order.softmax is "
                "'after_top_k'"
            )


class MoeRouterResult(NamedTuple):
    """``experts``, int64, and ``weights``, float32, [tokens, k] each, the largest weight first."""

    experts: NDArray[np.int64]
    weights: Float32Array


class MoeScores(NamedTuple):
    """What the choice is made from, float32, [tokens, experts] each."""

    #: What is ranked: logits or softmax, the correction bias added.
    ranked: Float32Array
    #: What the weights are gathered from: the softmax over all experts, or logits where it is taken of the chosen ones.
    scores: Float32Array


@quiet()
def moe_scores(logits: Float32Array, contract: MoeRouterContract, bias: Float32Array | None = None) -> MoeScores:
    """Scores of all experts.

    Args:
        logits: float32, [tokens, experts].
        bias: float32, [experts]: the correction bias (DeepSeek-V3, arXiv 2412.19437, 2.1.2), or None.

    Raises:
        TypeError, ValueError: dtype, shape or byte order; a NaN logit (it has no rank).
    """
    logits = float_array(logits, "logits", "tokens, experts")
    if np.isnan(logits).any():
        raise ValueError("logits: NaN has no rank among experts")
    logits = narrow(logits, contract.rounding.logits)
    if bias is not None:
        bias = narrow(float_array(bias, "bias", f"experts={logits.shape[1]}"), contract.rounding.bias)
        if np.isnan(bias).any():
            raise ValueError("bias: NaN has no rank among experts")
    weighs = contract.order.bias == "choice_and_weight"
    if bias is not None and weighs and contract.order.rank == "logits":
        logits, bias = logits + bias, None
    scores = logits
    if contract.order.softmax == "before_top_k":
        scores = exp(logits - row_maximum(logits)[:, None], contract.primitives.exp)
        scores = scores / row_sum(scores, contract.order.sum)[:, None]
        scores = narrow(scores, contract.rounding.scores)
    ranked = logits if contract.order.rank == "logits" else scores
    if bias is None:
        return MoeScores(ranked, scores)
    ranked = ranked + bias
    return MoeScores(ranked, ranked if weighs else scores)


@quiet()
def moe_choice(ranked: Float32Array, k: int, contract: MoeRouterContract) -> NDArray[np.int64]:
    """The ``k`` experts that rank highest, int64 [tokens, k], best first.

    Raises:
        TypeError, ValueError: dtype, shape or byte order; k out of range.
    """
    ranked = float_array(ranked, "ranked", "tokens, experts")
    number = ranked.shape[1]
    if not 1 <= k <= number:
        raise ValueError(f"k: must be 1 to {number}, the number of experts, got {k}")
    if contract.order.ties == "lowest_index":
        chosen = np.argsort(-ranked, axis=1, kind="stable")[:, :k]
    else:
        chosen = number - 1 - np.argsort(-ranked[:, ::-1], axis=1, kind="stable")[:, :k]
    return np.asarray(chosen, np.int64)


@quiet()
def moe_weights(scores: Float32Array, experts: NDArray[np.int64], contract: MoeRouterContract) -> Float32Array:
    """What each chosen expert weighs, float32 [tokens, k], in the order of ``experts``.

    Args:
        scores: of `MoeScores`. experts: int64, [tokens, k].
    """
    chosen = np.take_along_axis(float_array(scores, "scores", "tokens, experts"), experts, axis=1)
    if contract.order.softmax == "after_top_k":
        chosen = exp(chosen - row_maximum(chosen)[:, None], contract.primitives.exp)
    if contract.order.renormalise:
        chosen = chosen / row_sum(chosen, contract.order.sum)[:, None]
    return narrow(chosen, contract.rounding.weights)


def moe_router(
    logits: Float32Array, k: int, contract: MoeRouterContract, bias: Float32Array | None = None
) -> MoeRouterResult:
    """The ``k`` experts of each token and their weights.

    Args:
        logits: float32, [tokens, experts].
        k: experts per token, 1 to the number of experts.
        bias: float32, [experts]: the correction bias, or None.

    Raises:
        TypeError, ValueError: dtype, shape or byte order; k out of range; a NaN logit (it has no rank).
    """
    ranked, scores = moe_scores(logits, contract, bias)
    experts = moe_choice(ranked, k, contract)
    return MoeRouterResult(experts, moe_weights(scores, experts, contract))
