"""The fused dot-product-add of NVIDIA tensor cores, of which each generation sets the parameters.

Per group of consecutive k: the products and the accumulator align to their largest exponent, truncate toward zero to a
number of fractional bits, and add exactly; the sum truncates toward zero to the result. Results are never -0; one
beyond the largest float32 is infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from reference.arithmetic import Float64Array
from reference.checks import Float32Array
from reference.dot.aligned import (
    Operand,
    accumulate_groups,
    exponents,
    largest_exponent,
    power_of_two,
    truncated_sum,
)
from reference.dot.unit import Accumulate
from reference.formats import FLOAT32, Format


@dataclass(frozen=True)
class FusedSum:
    """Parameters of one fused dot-product-add."""

    #: Products per step.
    group: int
    #: Fractional bits kept, relative to the largest exponent.
    fraction_bits: int
    #: Exponent that a zero accumulator takes in the alignment.
    zero_exponent: int
    #: Mantissa bits of the result.
    result_bits: int = 23


def fused_accumulate(parameters: Callable[[Format], FusedSum]) -> Accumulate:
    """The `MatrixUnit.accumulate` of a generation whose parameters depend on the input format."""

    def accumulate(a: Float32Array, b: Float32Array, c: Float32Array, input_format: Format) -> Float32Array:
        unit = parameters(input_format)
        return accumulate_groups(a, b, c, input_format, unit.group, partial(_step, unit))

    return accumulate


def _step(unit: FusedSum, a: Operand, b: Operand, c: Float32Array) -> Float32Array:
    """One fused dot-product-add of a group."""
    own = np.where(c == 0, np.int16(unit.zero_exponent), exponents(c))
    largest = largest_exponent(a, b, own)
    total = truncated_sum(a, b, largest, unit.fraction_bits)
    total += np.trunc(c * power_of_two(np.int16(unit.fraction_bits) - largest))
    total *= power_of_two(largest - np.int16(unit.fraction_bits))
    return _truncate(total, unit.result_bits)


def _truncate(x: Float64Array, mantissa_bits: int) -> Float32Array:
    """float64 to float32 toward zero with `mantissa_bits` mantissa bits; infinite from 2^128 on; +0 for zeros."""
    u = x.view(np.int64)
    truncated = (u & np.int64(-1 << (52 - mantissa_bits))).view(np.float64)
    if np.abs(x).min(initial=np.inf) < FLOAT32.min_normal:
        subnormal = np.abs(x) < FLOAT32.min_normal
        spacing = 2.0 ** (FLOAT32.min_exponent - mantissa_bits)
        truncated = np.where(subnormal, np.trunc(x / spacing) * spacing, truncated)
    return truncated.astype(np.float32) + np.float32(0)
