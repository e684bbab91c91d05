"""Scalars that a side may have computed with in place of the model's: what each is called, and the call that has it.

No live module shows them where only a kernel knows them, so they are found from the bits (`scalar_search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diffcheck.infer.arguments import Arguments
from diffcheck.infer.sites import Site
from reference.primitives.rope_scaling import RopeParameters

#: Stands for an epsilon of 0, which the operator refuses: float32's least number changes no mean square above it.
_NOTHING = float(np.finfo(np.float32).smallest_subnormal)
_EPSILONS = (1e-5, 1e-6, 1e-12, 0.0, 1e-8, 1e-7, 1e-4, 1e-3, 1e-2)
_THETAS = (1e4, 1e6, 5e5, 1e5, 5e4, 5e6, 1e7, 1.5e5, 1e8)
_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 0.5, 0.25, 0.125)
_TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 0.5, 1.1, 1.2, 1.5, 2.0)
#: Longest window that is looked for.
_WINDOWS = 4096


@dataclass(frozen=True)
class Scalar:
    """One number of a call that could have been another."""

    name: str
    #: In a sentence: "with WORDS VALUE".
    words: str
    #: What the model's configuration makes it.
    configured: float
    apply: Callable[[Arguments, float], Arguments]
    #: Values that are tried before any other; the only ones where there is no range.
    famous: tuple[float, ...] = ()
    #: Ends of a logarithmic range; equal where a value is one of ``famous`` or none.
    low: float = 0.0
    high: float = 0.0
    #: Whether the output is proportional to it, so that a ratio of elements estimates it; -1: inversely.
    proportional: int = 0


def scalars_of(question: Site) -> Iterator[Scalar]:
    """The scalars of a site, the likeliest first."""
    a = question.arguments
    match a.operator:
        case "rms_norm" | "qk_norm":
            own = float(a.facts["epsilon"])
            yield Scalar("epsilon", "epsilon", own, _epsilon, _EPSILONS, 1e-12, 1.0)
            yield Scalar("weight_offset", "a weight plus", 0.0, _offset, (1.0, -1.0))
        case "linear" | "row_linear" | "lm_head" if "bias" in a.weights:
            yield Scalar("bias", "the bias times", 1.0, _bias, (0.0,))
        case "rope":
            yield from _of_rope(a)
        case "attention":
            own = 1 / math.sqrt(float(a.facts["head_dim"]))
            yield Scalar("scale", "softmax scale", own, _fact("scale"), tuple(_softmax_scales(a)), 2**-12, 2**6)
            longest = min(_WINDOWS, int(a.rows["keys"].max()))
            mine = float(a.facts.get("window", 0))
            windows = tuple(float(n) for n in range(1, longest) if n != mine)
            yield Scalar("window", "a window of", mine, _window, (*windows, 0.0) if mine else windows)
        case "processed_logits":
            own = float(a.facts["temperature"])
            yield Scalar("temperature", "temperature", own, _fact("temperature"), _TEMPERATURES, 2**-6, 2**6)
        case "logsumexp" | "logprob":
            yield Scalar("temperature", "temperature", 1.0, _fact("inner_temperature"), _TEMPERATURES, 2**-6, 2**6)
        case "residual_add":
            yield Scalar("branch", "the added branch times", 1.0, _fact("branch_factor"), _FACTORS, 2**-12, 2**12)
    if a.operator not in ("logsumexp", "logprob"):
        yield from _of_output(question)


def _of_output(question: Site) -> Iterator[Scalar]:
    """Factors of the whole output: behind its rounding, before it, and as a divisor."""
    operator = question.arguments.operator
    width = float(question.target.shape[1])
    what = {"kv_cache": "cache scale", "embedding": "embeddings times", "lm_head": "logits times"}
    words, name = what.get(operator, "the output times"), "cache_scale" if operator == "kv_cache" else "factor"
    famous = (*_FACTORS, *(width**p for p in (0.5, -0.5)), 1 / math.sqrt(2))
    span = {"famous": famous, "low": 2**-14, "high": 2**14}
    yield Scalar(name, words, 1.0, _fact("factor"), **span, proportional=1)  # type: ignore[arg-type]
    yield Scalar(name, words, 1.0, _fact("inner_factor"), **span, proportional=1)  # type: ignore[arg-type]
    divided, called = ("logits divided by", "temperature") if operator == "lm_head" else ("the output divided by", name)
    yield Scalar(called, divided, 1.0, _fact("divisor"), _TEMPERATURES, 2**-14, 2**14, proportional=-1)


def _of_rope(a: Arguments) -> Iterator[Scalar]:
    theta = a.facts["theta"]
    own = theta if isinstance(theta, RopeParameters) else RopeParameters(float(theta))
    yield Scalar("theta", "theta", own.theta, _of_parameters(own, "theta"), _THETAS, 1e2, 1e9)
    shape = "linear" if own.kind == "default" else own.kind
    base = replace(own, kind=shape)
    yield Scalar("rope_factor", "RoPE factor", own.factor, _of_parameters(base, "factor"), _FACTORS, 2**-6, 2**8)
    attention = _of_parameters(own, "attention_factor")
    ramps = tuple(0.1 * math.log(n) + 1 for n in (2, 4, 8, 16, 32, 40, 64))
    yield Scalar("attention_factor", "RoPE attention factor", own.attention_factor, attention, ramps, 2**-6, 2**6)
    shifts = tuple(float(n) for k in range(1, 17) for n in (k, -k))
    yield Scalar("position_offset", "positions moved by", 0.0, _shifted, shifts)


def _softmax_scales(a: Arguments) -> Iterator[float]:
    """Scales that models of other makers use: none at all, 1/d, of a neighbouring or of the whole width, ..."""
    d, width = float(a.facts["head_dim"]), float(a.rows["x"].shape[1])
    yield from (1.0, 1 / d, width**-0.5, (2 * d) ** -0.5, (d / 2) ** -0.5, d**-0.25)
    yield from (float(n) ** -0.5 for n in (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256))


def _fact(name: str) -> Callable[[Arguments, float], Arguments]:
    return lambda a, value: replace(a, facts={**a.facts, name: value})


def _epsilon(a: Arguments, value: float) -> Arguments:
    return replace(a, facts={**a.facts, "epsilon": value or _NOTHING})


def _window(a: Arguments, value: float) -> Arguments:
    return replace(a, facts={**a.facts, "window": int(value) or None})


def _offset(a: Arguments, value: float) -> Arguments:
    return replace(a, weights={**a.weights, "weight": a.weights["weight"] + np.float32(value)})


def _bias(a: Arguments, value: float) -> Arguments:
    assert value == 0.0
    return replace(a, weights={name: w for name, w in a.weights.items() if name != "bias"})


def _of_parameters(own: RopeParameters, name: str) -> Callable[[Arguments, float], Arguments]:
    def apply(a: Arguments, value: float) -> Arguments:
        changed: dict[str, Any] = {name: value}
        return replace(a, facts={**a.facts, "theta": replace(own, **changed)})

    return apply


def _shifted(a: Arguments, value: float) -> Arguments:
    """Positions of which one would be negative are another question: ValueError."""
    return replace(a, rows={**a.rows, "position": a.rows["position"] + int(value)})
