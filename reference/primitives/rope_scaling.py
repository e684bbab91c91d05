"""Inverse frequencies of RoPE, as they are and scaled for longer contexts.

Sources: Su et al. 2021, "RoFormer" (default); Chen et al. 2023, "Extending Context Window of Large Language Models via
Positional Interpolation" (linear); Peng et al. 2023, "YaRN" (yarn); the Llama 3.1 model code (llama3). Names and
defaults are those of transformers' ``rope_parameters``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mpmath
import numpy as np

from reference.checks import Float32Array
from reference.primitives.correctly_rounded import round_mpmath

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeParameters:
    """What the table of cosines and sines is made from. Frozen and hashable.

    With base frequencies f[i] = theta^(-2i/dim), the frequencies are: default, f; linear, f / factor; llama3, f above
    the high, f / factor below the low frequency, and a mixture between; yarn, f where a pair turns ``beta_fast`` times
    and more over the original context, f / factor where it turns ``beta_slow`` times and less, and a ramp between.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: Positions that the unscaled model was trained for.
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    #: Whether yarn's ramp begins and ends at whole pairs.
    truncate: bool = True
    #: Factor of cosines and sines.
    attention_factor: float = 1.0

    @classmethod
    def from_rope(cls, rope: Mapping[str, Any], max_position_embeddings: int) -> RopeParameters:
        """From a model's rope dictionary with ``rope_type`` and ``rope_theta``.

        Raises:
            ValueError: a kind that is not specified here, a parameter that it needs and that is missing, or a value
                outside its range; it is named.
        """
        kind = rope["rope_type"]
        if kind not in KINDS:
            raise ValueError(f"rope_type {kind!r} is not supported; supported are {', '.join(KINDS)}")
        needed = {"default": (), "linear": ("factor",), "yarn": ("factor",)}.get(
            kind, ("factor", "low_freq_factor", "high_freq_factor")
        )
        if missing := [name for name in needed if rope.get(name) is None]:
            raise ValueError(f"rope_type {kind!r} needs {missing[0]}")
        used = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": (
                *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
                *("attention_factor", "mscale", "mscale_all_dim"),
            ),
        }[kind]
        free = ("rope_type", "rope_theta", "partial_rotary_factor")
        # transformers warns of a parameter that the kind does not have; others apply it.
        if foreign := [name for name in rope if name not in (*used, *free)]:
            raise ValueError(f"rope_type {kind!r} has no {foreign[0]} ({rope[foreign[0]]!r})")
        given = {name: rope[name] for name in used if rope.get(name) is not None}
        mscale, all_dim = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        made = cls(float(rope["rope_theta"]), kind, **{k: _number(k, v) for k, v in given.items()})
        if made.factor < 1:
            raise ValueError(f"rope factor {made.factor} must be at least 1")
        if kind in ("llama3", "yarn") and not made.original_max_position_embeddings:
            made = replace(made, original_max_position_embeddings=max_position_embeddings)
        if kind == "llama3" and not made.high_freq_factor > made.low_freq_factor:
            raise ValueError("rope high_freq_factor must be above low_freq_factor")
        if kind == "yarn" and "attention_factor" not in given:
            made = replace(made, attention_factor=_yarn_attention_factor(made.factor, mscale, all_dim))
        return made

    def describe(self) -> str:
        """The scaling in words: ``llama3 (factor 8, ...)``."""
        if self.kind == "default":
            return "default"
        names = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        }[self.kind]
        return f"{self.kind} ({', '.join(f'{name} {getattr(self, name):g}' for name in names)})"


def _number(name: str, value: Any) -> Any:
    if name == "truncate":
        return bool(value)
    return int(value) if name == "original_max_position_embeddings" else float(value)


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """YaRN's temperature of the softmax, as a factor of queries and keys: 0.1 ln(factor) + 1."""

    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return float(of(mscale) / of(mscale_all_dim)) if mscale and mscale_all_dim else of(1.0)


def exact_frequencies(dim: int, rope: RopeParameters) -> Float32Array:
    """Frequencies [dim / 2], each the exact value with one rounding to float32."""
    ramp = _yarn_ramp(dim, rope) if rope.kind == "yarn" else None

    def frequency(i: int) -> np.float32:
        def exact(theta: Any) -> Any:
            base = mpmath.power(theta, mpmath.mpf(-2 * i) / dim)
            if rope.kind == "linear":
                return base / rope.factor
            if rope.kind == "llama3":
                turns = rope.original_max_position_embeddings * base / (2 * mpmath.pi)
                if turns > rope.high_freq_factor:
                    return base
                if turns < rope.low_freq_factor:
                    return base / rope.factor
                smooth = (turns - rope.low_freq_factor) / (
                    mpmath.mpf(rope.high_freq_factor) - mpmath.mpf(rope.low_freq_factor)
                )
                return (1 - smooth) * base / rope.factor + smooth * base
            if ramp is not None:
                low, high = ramp
                share = min(max((mpmath.mpf(i) - low) / (mpmath.mpf(high) - low), mpmath.mpf(0)), mpmath.mpf(1))
                return base / rope.factor * share + base * (1 - share)
            return base

        return round_mpmath(exact, rope.theta)

    return np.array([frequency(i) for i in range(dim // 2)], np.float32)


def float32_frequencies(dim: int, rope: RopeParameters) -> Float32Array:
    """Frequencies [dim / 2] with every step rounded to float32, in the order of transformers, vLLM and Megatron-core,
    which agree in it; powers are correctly rounded.
    """
    one, factor = np.float32(1), np.float32(rope.factor)
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.array(
        [round_mpmath(lambda y: mpmath.power(rope.theta, y), float(exponent)) for exponent in exponents], np.float32
    )
    base = one / powers
    if rope.kind == "linear":
        return np.asarray(base / factor)
    if rope.kind == "llama3":
        length, low = np.float32(rope.original_max_position_embeddings), np.float32(rope.low_freq_factor)
        wavelength = np.float32(2 * math.pi) / base
        smooth = (length / wavelength - low) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
        mixed = (one - smooth) * base / factor + smooth * base
        longest = np.float32(rope.original_max_position_embeddings / rope.low_freq_factor)
        shortest = np.float32(rope.original_max_position_embeddings / rope.high_freq_factor)
        return np.where(wavelength < shortest, base, np.where(wavelength > longest, base / factor, mixed))
    if rope.kind == "yarn":
        begin, end = _yarn_ramp(dim, rope)
        ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(begin)) / np.float32(end - begin)
        keep = one - np.clip(ramp, np.float32(0), one)
        return np.asarray(one / (factor * powers) * (one - keep) + base * keep)
    return base


def _yarn_ramp(dim: int, rope: RopeParameters) -> tuple[float, float]:
    """Pairs at which YaRN's ramp begins and ends."""

    def pair(turns: float) -> float:
        positions = rope.original_max_position_embeddings
        return (dim * math.log(positions / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return (low, high + 0.001) if low == high else (low, high)
