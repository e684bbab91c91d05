"""Models of matrix units that a probe's bits are held against: the reference's, and others that are in use.

Public models of one unit contradict each other. What tells them apart is a handful of operands on the chip itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from reference.checks import Float32Array
from reference.dot import UNITS
from reference.dot.mfma_cdna1 import round_exact_sum
from reference.dot.nvidia import FusedSum, fused_accumulate
from reference.dot.unit import Accumulate
from reference.formats import FORMATS, Format


@dataclass(frozen=True)
class Model:
    """One hypothesis about a unit."""

    name: str
    accumulate: Accumulate


def known(fmt: Format) -> Iterator[Model]:
    """Every model of a unit that takes ``fmt``, and simple ones that emulators use."""
    for name, unit in UNITS.items():
        if fmt.name in unit.input_formats:
            yield Model(name, unit.accumulate)
        elif fmt.bits == 8 and "float16" in unit.input_formats:
            # a unit without the format may widen it first, which is exact
            yield Model(f"{name} as float16", partial(_as_float16, unit.accumulate))
    for group in (1, 2, 4, 8, 16, 32):
        yield Model(f"exact sum of {group} and C, one rounding", partial(_exact, group))
    yield Model("product rounded, then added, per k", _two_roundings)


def aligned_family(fmt: Format) -> Iterator[Model]:
    """NVIDIA's kind of fused sum over its plausible parameters: what to look through where no known model fits."""
    for group, bits, result in product((4, 8, 16, 32), (13, *range(22, 29)), (23, 13)):
        fused = FusedSum(group, bits, zero_exponent=-133, result_bits=result)
        name = f"{group} products and C aligned, {bits} fractional bits, {result} in the result, toward zero"
        yield Model(name, fused_accumulate(partial(_constant, fused)))


def _constant(fused: FusedSum, _: Format) -> FusedSum:
    return fused


def _as_float16(accumulate: Accumulate, a: Float32Array, b: Float32Array, c: Float32Array, _: Format) -> Float32Array:
    return accumulate(a, b, c, FORMATS["float16"])


def _exact(group: int, a: Float32Array, b: Float32Array, c: Float32Array, _: Format) -> Float32Array:
    result = c
    with np.errstate(all="ignore"):
        left, right = a.astype(np.float64), b.astype(np.float64)
        for k in range(0, a.shape[1], group):
            terms = [left[:, i, None] * right[i] for i in range(k, min(k + group, a.shape[1]))]
            result = round_exact_sum([*terms, result.astype(np.float64)])
    return result


def _two_roundings(a: Float32Array, b: Float32Array, c: Float32Array, _: Format) -> Float32Array:
    result = c.copy()
    with np.errstate(all="ignore"):
        for k in range(a.shape[1]):
            result = result + a[:, k, None] * b[k]
    return result
