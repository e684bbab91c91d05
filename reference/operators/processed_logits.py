"""What samplers do to logits before the log-sum-exp: temperature, top-k and top-p (nucleus) masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array, positive
from reference.operators._numerics import EXPS, ROW_ORDERS, exp, narrow, quiet, row_order_words, row_sum
from reference.operators.logsumexp import row_maximum


@dataclass(frozen=True)
class Domain(Group):
    top_k_ties: str = choice(
        ("keep", "lowest_index"),
        {
            "keep": "keeps every logit equal to the k-th largest",
            "lowest_index": "keeps exactly k logits, of equal ones those with the lowest index",
        },
    )


@dataclass(frozen=True)
class Order(Group):
    filters: str = choice(
        ("top_k_top_p", "top_p_top_k"),
        {
            "top_k_top_p": "masks by top-k first and top-p second",
            "top_p_top_k": "masks by top-p first and top-k second",
        },
    )
    top_p: str = choice(
        ("ascending", "descending"),
        {
            "ascending": "sorts upwards and drops tokens while the cumulated probability stays at or below 1 - p",
            "descending": "sorts downwards and drops tokens once the probability before them exceeds p",
        },
    )
    sum: str = choice(ROW_ORDERS, row_order_words("normalises top-p probabilities by a sum"))


@dataclass(frozen=True)
class Precision(Group):
    cumulated: str = choice(
        ("float32", "float64"),
        {
            "float32": "cumulates probabilities in float32",
            "float64": "cumulates probabilities in float64 and rounds each partial sum to float32",
        },
    )


@dataclass(frozen=True)
class Rounding(Group):
    output: str = format_choice("float32", "returns float32 logits", "rounds scaled logits to {value}")


@dataclass(frozen=True)
class Primitives(Group):
    temperature: str = choice(
        ("divide", "reciprocal"),
        {
            "divide": "divides logits by the temperature",
            "reciprocal": "multiplies logits by fp32(1 / temperature)",
        },
    )
    exp: str = choice(EXPS, "computes exp as {value}")
    normalise: str = choice(
        ("divide", "reciprocal"),
        {
            "divide": "divides top-p weights by their sum",
            "reciprocal": "multiplies top-p weights by the reciprocal of their sum",
        },
    )


@dataclass(frozen=True)
class ProcessedLogitsContract(Contract):
    """y = x / temperature; masked columns become -inf.
    Probabilities of top-p are exp(y - max) / sum in sorted order, cumulated one after the other in float32.
    The sort is by value, of equal values by index; the most probable token always stays.
    A row with a NaN has no order: top-k and top-p leave it whole, so that each of its log-probabilities is NaN."""

    operator: ClassVar[str] = "processed_logits"
    domain: Domain = Domain()
    order: Order = Order()
    precision: Precision = Precision()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()


def processed_logits(
    logits: Float32Array,
    contract: ProcessedLogitsContract,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Float32Array:
    """Scale and mask logits.

    Args:
        logits: float32, [tokens, vocabulary].
        temperature: above 0; rounded to float32.
        top_k: number of logits to keep, at least 1; None keeps all.
        top_p: probability mass to keep, in (0, 1]; rounded to float32; None or 1 keeps all.

    Returns:
        float32, [tokens, vocabulary]. A row with a NaN (also one that the scaling made) is scaled and not masked.

    Raises:
        TypeError, ValueError: dtype, shape or byte order; a setting outside its range; a mask of an empty vocabulary.
    """
    logits = float_array(logits, "logits", "tokens, vocabulary")
    positive(temperature, "temperature")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k: must be an integer of at least 1 or None, got {top_k!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: must be above 0 and at most 1, or None, got {top_p!r}")
    scaled = narrow(_scale(logits, np.float32(temperature), contract), contract.rounding.output)
    masks: list[Callable[[Float32Array], NDArray[np.bool_]]] = []
    if top_k is not None:
        masks.append(lambda x: _top_k_mask(x, top_k, contract))
    if top_p is not None and top_p < 1:
        masks.append(lambda x: _top_p_mask(x, top_p, contract))
    if masks and logits.shape[1] == 0:
        raise ValueError("logits: the vocabulary is empty")
    corrupted = np.isnan(scaled).any(axis=1, keepdims=True)
    for mask in masks if contract.order.filters == "top_k_top_p" else reversed(masks):
        scaled = np.where(mask(scaled) | corrupted, scaled, np.float32(-np.inf))
    return scaled


@quiet()
def _scale(logits: Float32Array, temperature: np.float32, contract: ProcessedLogitsContract) -> Float32Array:
    if contract.primitives.temperature == "divide":
        return logits / temperature
    return logits * (np.float32(1) / temperature)


def _top_k_mask(logits: Float32Array, k: int, contract: ProcessedLogitsContract) -> NDArray[np.bool_]:
    k = min(k, logits.shape[1])
    if contract.domain.top_k_ties == "keep":
        threshold = np.sort(logits, axis=1)[:, -k]
        return logits >= threshold[:, None]
    keep = np.zeros(logits.shape, np.bool_)
    np.put_along_axis(keep, np.argsort(-logits, axis=1, kind="stable")[:, :k], True, axis=1)
    return keep


@quiet()
def _top_p_mask(logits: Float32Array, p: float, contract: ProcessedLogitsContract) -> NDArray[np.bool_]:
    ascending = contract.order.top_p == "ascending"
    by_value = np.argsort(logits if ascending else -logits, axis=1, kind="stable")
    ordered = np.take_along_axis(logits, by_value, axis=1)
    weights = exp(ordered - row_maximum(logits)[:, None], contract.primitives.exp)
    total = row_sum(weights, contract.order.sum)[:, None]
    divide = contract.primitives.normalise == "divide"
    probabilities = weights / total if divide else weights * (np.float32(1) / total)
    # accumulate adds strictly one after the other
    cumulated = np.add.accumulate(probabilities, axis=1, dtype=contract.precision.cumulated).astype(np.float32)
    if ascending:
        kept = cumulated > np.float32(1) - np.float32(p)
        kept[:, -1] = True
    else:
        kept = cumulated - probabilities <= np.float32(p)
        kept[:, 0] = True
    keep = np.zeros(logits.shape, np.bool_)
    np.put_along_axis(keep, by_value, kept, axis=1)
    return keep
