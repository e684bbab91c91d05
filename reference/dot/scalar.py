"""Scalar specification of every matrix unit: one output element, in exact fractions, to read and to test against.

A kernel author reads here what a unit does; `reference.dot.dot` computes the same bits over whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from math import copysign, floor, inf, isfinite, trunc
from operator import add

from reference.dot import hopper_k16
from reference.dot.ampere_k8 import parameters as ampere_parameters
from reference.dot.nvidia import FusedSum
from reference.formats import FLOAT32, Format
from reference.rounding import round_scalar

#: step(a, b, c, format) -> new accumulator, for one group of consecutive k.
Step = Callable[[Sequence[float], Sequence[float], float, Format], float]


def dot_scalar(a: Sequence[float], b: Sequence[float], c: float, unit: str, fmt: Format) -> float:
    """c + sum of a[k] * b[k] as `unit` computes it.

    Args:
        a, b: values of `fmt`, of equal length.
        c: a float32 value.
        unit: a key of `reference.dot.UNITS`.

    Raises:
        ValueError: lengths differ, or the unit does not take the format.
    """
    if len(a) != len(b):
        raise ValueError(f"a, b: lengths {len(a)} and {len(b)} differ")
    group, step = _step(unit, fmt)
    for first in range(0, len(a), group):
        k = slice(first, first + group)
        fill = [0.0] * (group - len(a[k]))
        c = step([*a[k], *fill], [*b[k], *fill], c, fmt)
    return c


def _step(unit: str, fmt: Format) -> tuple[int, Step]:
    """Products per step, and the step."""
    if fmt.name == "float32" or unit == "fma32-seq":
        return 1, fma_step
    if unit == "mfma-cdna3-g8":
        return {"tfloat32": 4, "float8_e4m3fnuz": 16}.get(fmt.name, 8), cdna3_step
    if unit == "mfma-cdna2":
        return 8, cdna2_step
    if unit == "amx-bf16":
        return 32, amx_step
    if unit == "mfma-cdna1":
        return {"bfloat16": 2, "float16": 4}[fmt.name], cdna1_step
    parameters = {"hopper-k16": hopper_k16.parameters, "ampere-k8": ampere_parameters}
    if unit not in parameters:
        raise ValueError(f"unit: {unit!r} has no scalar specification")
    fused = parameters[unit](fmt)
    return fused.group, lambda a, b, c, fmt: nvidia_step(a, b, c, fmt, fused)


def fma_step(a: Sequence[float], b: Sequence[float], c: float, fmt: Format) -> float:
    """One FMA: a single rounding to nearest even, subnormals kept."""
    return _rounded([a[0] * b[0]], [Fraction(a[0]) * Fraction(b[0])], c) if _finite(a, b, c) else a[0] * b[0] + c


def cdna1_step(a: Sequence[float], b: Sequence[float], c: float, fmt: Format) -> float:
    """The exact sum of the products and C, rounded once."""
    products = [x * y for x, y in zip(a, b, strict=True)]
    if not _finite(a, b, c):
        return _in_order(products) + c
    return _rounded(products, [Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)], c)


def cdna2_step(a: Sequence[float], b: Sequence[float], c: float, fmt: Format) -> float:
    """One instruction, twice C + ((p0 + p1) + (p2 + p3)): each operation rounds to nearest even and flushes."""

    def operand(x: float, smallest: float) -> float:
        return 0.0 if abs(x) < smallest else x

    def result(x: float) -> float:
        rounded = round_scalar(x, FLOAT32)
        return copysign(0.0, rounded) if abs(rounded) < FLOAT32.min_normal else rounded

    # float64 arithmetic before each rounding is exact for products, and innocuous double rounding for sums of float32
    pairs = zip(a, b, strict=True)
    p = [result(operand(x, fmt.min_normal) * operand(y, fmt.min_normal)) for x, y in pairs]
    c = operand(c, FLOAT32.min_normal)
    for i in (0, 4):
        c = result(c + result(result(p[i] + p[i + 1]) + result(p[i + 2] + p[i + 3])))
    return c


def amx_step(a: Sequence[float], b: Sequence[float], c: float, fmt: Format) -> float:
    """One instruction: FMA chains over the even and over the odd products, their sum, then C; all flushed."""

    def flush(x: float) -> float:
        return copysign(0.0, x) if abs(x) < FLOAT32.min_normal else x

    chains = [0.0, 0.0]
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        chains[k % 2] = flush(fma_step([flush(x)], [flush(y)], chains[k % 2], fmt))
    both = flush(round_scalar(chains[0] + chains[1], FLOAT32))
    return flush(round_scalar(flush(c) + both, FLOAT32))


def cdna3_step(a: Sequence[float], b: Sequence[float], c: float, fmt: Format) -> float:
    """Products truncated against their largest exponent, summed exactly, then floored against the accumulator's."""
    products = [x * y for x, y in zip(a, b, strict=True)]
    if not _finite(a, b, c) or any(abs(p) >= 2.0**128 for p in products):
        return _in_order([c, *(copysign(inf, p) if abs(p) >= 2.0**128 else p for p in products)])
    parts = [_truncated_sum(a[i::2], b[i::2], fmt) for i in (0, 1)] if fmt.bits == 8 else [_truncated_sum(a, b, fmt)]
    largest = max(exponent for _, exponent in parts)
    total = sum((_floored(value, largest - 24) for value, _ in parts), start=Fraction(0))
    own = _exponent(c, FLOAT32, zero=FLOAT32.min_exponent)
    common = max(largest, own)
    addend = Fraction(0) if fmt.bits == 8 and own < common - 25 else _floored(Fraction(c), common - 24)
    total = _floored(total, common - 32) + addend
    if total == 0:
        return 0.0
    return round_scalar(_floored(total, max(_fraction_exponent(total), -126) - 31), FLOAT32)


def _truncated_sum(a: Sequence[float], b: Sequence[float], fmt: Format) -> tuple[Fraction, int]:
    """The products, truncated to 24 bits below their largest exponent and summed; and that exponent."""
    exponents = [_exponent(x, fmt) + _exponent(y, fmt) for x, y in zip(a, b, strict=True) if x and y]
    largest = max(exponents, default=-256)
    products = (Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True))
    return sum((_truncated(p, largest - 24) for p in products), start=Fraction(0)), largest


def nvidia_step(a: Sequence[float], b: Sequence[float], c: float, fmt: Format, unit: FusedSum) -> float:
    """Products and C truncated against one largest exponent, summed exactly, truncated to the result's bits, no -0."""
    if not _finite(a, b, c):
        return _in_order([c, *(x * y for x, y in zip(a, b, strict=True))])
    exponents = [_exponent(x, fmt) + _exponent(y, fmt) for x, y in zip(a, b, strict=True) if x and y]
    largest = max([*exponents, _exponent(c, FLOAT32, zero=unit.zero_exponent)])
    terms = [*(Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)), Fraction(c)]
    total = sum((_truncated(term, largest - unit.fraction_bits) for term in terms), start=Fraction(0))
    if total == 0:
        return 0.0
    result = _truncated(total, max(_fraction_exponent(total), -126) - unit.result_bits)
    return (copysign(inf, result) if abs(result) >= 2**128 else float(result)) + 0.0


def _rounded(products: Sequence[float], exact: Sequence[Fraction], c: float) -> float:
    """The exact sum to nearest even; an exact zero takes the sign that IEEE addition gives it."""
    total = sum(exact, start=Fraction(c))
    if total == 0:
        return 0.0 if any(exact) or c else _in_order([*products, c])
    return round_scalar(total, FLOAT32)


def _in_order(values: Sequence[float]) -> float:
    """Plain addition, for what infinities, NaN and signed zeros give: `sum` compensates floats from Python 3.12 on."""
    return reduce(add, values)


def _finite(a: Sequence[float], b: Sequence[float], c: float) -> bool:
    return all(map(isfinite, (*a, *b, c)))


def _exponent(x: float, fmt: Format, zero: int = 0) -> int:
    """floor(log2 |x|), at least the format's smallest normal exponent; `zero` for zero."""
    return max(_fraction_exponent(Fraction(x)), fmt.min_exponent) if x else zero


def _fraction_exponent(x: Fraction) -> int:
    """floor(log2 |x|) of a nonzero fraction."""
    magnitude = abs(x)
    estimate = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return estimate if magnitude >= Fraction(2) ** estimate else estimate - 1


def _truncated(x: Fraction, last_place: int) -> Fraction:
    """`x` toward zero to a multiple of 2^last_place."""
    return trunc(x / Fraction(2) ** last_place) * Fraction(2) ** last_place


def _floored(x: Fraction, last_place: int) -> Fraction:
    """`x` downwards to a multiple of 2^last_place."""
    return floor(x / Fraction(2) ** last_place) * Fraction(2) ** last_place
