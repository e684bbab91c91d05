"""Operands of the unit probes: values of a format in which one model of a matrix unit differs from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.checks import Float32Array
from reference.formats import FLOAT32, Format, decode
from reference.rounding import round_to

#: Kinds of values. ``codes`` draws every finite bit pattern alike: all exponents, products far beyond overflow too.
KINDS = ("normal", "wide", "codes", "cancelling", "subnormal", "signed_zero", "infinity", "nan")


@dataclass(frozen=True)
class Operands:
    """Independent products ``c + a @ b``: float32 a [P, M, K], b [P, K, N], c [P, M, N], a and b exact in a format."""

    a: Float32Array
    b: Float32Array
    c: Float32Array


def operands(kind: str, fmt: Format, products: int, size: int, inner: int) -> Operands:
    """``products`` products of [size, inner] and [inner, size]; the same values on every machine.

    Raises:
        ValueError: unknown kind.
    """
    rng = np.random.default_rng([KINDS.index(kind), fmt.bits, fmt.mantissa_bits, products, size, inner])
    left, right = (products, size, inner), (products, inner, size)
    a, b = _values(kind, left, fmt, rng), _values(kind, right, fmt, rng)
    if kind == "cancelling":
        a[:, :, 1::2] = a[:, :, 0 : inner - inner % 2 : 2]
        nudge = 1 + np.float32(2.0**-fmt.mantissa_bits) * rng.integers(-1, 2, b[:, 1::2].shape).astype(np.float32)
        b[:, 1::2] = round_to(-b[:, 0 : inner - inner % 2 : 2] * nudge, fmt, "rne", "saturate")
    return Operands(a, b, _start(kind, (products, size, size), fmt, rng))


def _values(kind: str, shape: tuple[int, ...], fmt: Format, rng: np.random.Generator) -> Float32Array:
    x = rng.standard_normal(shape).astype(np.float32)
    binades = min(24, (1 << fmt.exponent_bits) // 4)
    if kind == "codes" or (kind == "wide" and fmt.bits == 8):
        return _codes(shape, fmt, fmt.max_code, rng)
    if kind in ("wide", "cancelling"):
        x = np.ldexp(x, rng.integers(-binades, binades, shape) // (1 if kind == "wide" else 3))
    elif kind == "subnormal" and fmt.exponent_bits < 8:
        x = np.where(rng.random(shape) < 0.3, x, _codes(shape, fmt, 2 << fmt.mantissa_bits, rng))
    elif kind == "subnormal":
        x = np.ldexp(x, rng.integers(-72, -56, shape))
        x[rng.random(shape) < 0.1] *= np.float32(2.0**-66)
    elif kind == "signed_zero":
        x = np.where(rng.random(shape) < 0.9, np.copysign(np.float32(0), x), x)
    x = round_to(np.asarray(x, np.float32), fmt, "rne", "saturate")
    if kind == "infinity":
        largest = np.float32(np.inf if fmt.has_infinity else fmt.max_finite)
        x[rng.random(shape) < 0.02] = largest
        x[rng.random(shape) < 0.02] = -largest
    elif kind == "nan":
        x[rng.random(shape) < 0.01] = np.nan
    return x


def _codes(shape: tuple[int, ...], fmt: Format, most: int, rng: np.random.Generator) -> Float32Array:
    """Bit patterns with magnitudes up to ``most``, of either sign, alike."""
    magnitude = rng.integers(0, most, shape, dtype=np.int64, endpoint=True)
    sign = rng.integers(0, 2, shape, dtype=np.int64) << (fmt.bits - 1)
    if not fmt.has_negative_zero:
        sign[magnitude == 0] = 0
    codes: Any = (magnitude | sign).astype(fmt.storage)
    return decode(codes, fmt)


def _start(kind: str, shape: tuple[int, ...], fmt: Format, rng: np.random.Generator) -> Float32Array:
    """Accumulators: zeros for a quarter, else of the size of a product or far from it."""
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "codes":
        x = _codes(shape, FLOAT32, FLOAT32.max_code, rng)
    elif kind in ("wide", "cancelling"):
        x = np.ldexp(x, rng.integers(-30, 30, shape)).astype(np.float32)
    elif kind == "subnormal":
        x = np.ldexp(x, rng.integers(-148, -110, shape)).astype(np.float32)
    x[rng.random(shape) < 0.25] = 0
    if kind == "signed_zero":
        x = np.where(rng.random(shape) < 0.5, np.float32(-0.0), x)
    return x
