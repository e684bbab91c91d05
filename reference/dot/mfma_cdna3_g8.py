"""`mfma-cdna3-g8`: gfx942 MFMA (MI300X), groups of 8 consecutive k for bfloat16 and float16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.dot import fma32_seq
from reference.dot.aligned import (
    Exponents,
    Float64Array,
    Operand,
    exponents,
    largest_exponent,
    may_leave_finite,
    non_finite_sum,
    operand,
    power_of_two,
    tiles,
    truncated_sum,
)
from reference.dot.unit import MatrixUnit
from reference.formats import FLOAT32, Format

#: Fractional bits kept of a product, and of the accumulator.
FRACTION_BITS = 24
#: Fractional bits kept of the products' sum once it is aligned with the accumulator.
SUM_BITS = 32
#: Bits that the sum keeps before it is rounded to nearest; the others are floored away.
SIGNIFICANT_BITS = 32
#: Products of this magnitude or more count as infinite.
PRODUCT_LIMIT = 2.0**128
#: Below every exponent that a product of nonzero operands can have.
LEAST_EXPONENT = -256
#: Consecutive k of one step, by format.
GROUPS = {"bfloat16": 8, "float16": 8, "tfloat32": 4, "float8_e4m3fnuz": 16}


def accumulate(a: Float32Array, b: Float32Array, c: Float32Array, input_format: Format) -> Float32Array:
    """c + a @ b as gfx942 MFMA along ascending K: float32 a [M, K], b [K, N], c [M, N]."""
    if input_format.name == "float32":
        return fma32_seq.accumulate(a, b, c, input_format)
    size = GROUPS[input_format.name]
    checked = may_leave_finite(a, b, c)
    result = np.array(c, np.float32, order="C")
    with np.errstate(all="ignore"):
        for rows, columns in tiles(*result.shape):
            left = operand(a[rows].T, input_format, size)
            right = operand(b[:, columns], input_format, size)
            accumulator = result[rows, columns]
            for k in range(0, left.values.shape[0], size):
                accumulator = _step(left.group(k, size), right.group(k, size), accumulator, checked)
            result[rows, columns] = accumulator
    return result


def _step(a: Operand, b: Operand, c: Float32Array, checked: bool) -> Float32Array:
    """One group: a [group, M], b [group, N], c [M, N]."""
    finite = np.where(np.isfinite(c), c, np.float32(0)) if checked else c
    result = _add_accumulator(*_sum_products(a, b), finite)
    if not checked:
        return result
    special = non_finite_sum(a, b, c, PRODUCT_LIMIT)
    return np.where(np.isfinite(special), result, special.astype(np.float32))


def _sum_products(a: Operand, b: Operand) -> tuple[Float64Array, Exponents]:
    """Exact sum of the truncated products, in units of 2^(exponent - 24), and that exponent."""
    start = np.full((a.values.shape[1], b.values.shape[1]), LEAST_EXPONENT, np.int16)
    largest = largest_exponent(a, b, start)
    return truncated_sum(a, b, power_of_two(FRACTION_BITS - largest)), largest


def _add_accumulator(total: Float64Array, exponent: Exponents, c: Float32Array) -> Float32Array:
    """Floor the products' sum and the accumulator against their larger exponent, add, round to nearest even."""
    common = np.maximum(exponent, np.maximum(exponents(c, FLOAT32), np.int16(FLOAT32.min_exponent)))
    total = np.floor(total * power_of_two(exponent + np.int16(SUM_BITS - FRACTION_BITS) - common))
    addend = np.floor(c * power_of_two(FRACTION_BITS - common)) * 2.0 ** (SUM_BITS - FRACTION_BITS)
    return _round_sum((total + addend) * power_of_two(common - np.int16(SUM_BITS)))


def _round_sum(x: Float64Array) -> Float32Array:
    """Floor to 32 significant bits, or to the spacing they have at 2^-126, then round to nearest even."""
    dropped: NDArray[np.int64] = np.int64((1 << (53 - SIGNIFICANT_BITS)) - 1)
    u = x.view(np.int64)
    # integer order follows magnitude: flooring a negative value adds to its bits
    floored = ((u + (dropped & (u >> np.int64(63)))) & ~dropped).view(np.float64)
    subnormal = np.abs(x) < FLOAT32.min_normal
    if subnormal.any():
        spacing = 2.0 ** (FLOAT32.min_exponent - SIGNIFICANT_BITS + 1)
        floored = np.where(subnormal, np.floor(x / spacing) * spacing, floored)
    return floored.astype(np.float32)


UNIT = MatrixUnit(
    name="mfma-cdna3-g8",
    hardware="gfx942 v_mfma_f32_16x16x16 and 32x32x8 (bfloat16, float16), _xf32, _f32",
    input_formats=("float32", "tfloat32", "bfloat16", "float16"),
    arithmetic="8 products aligned, 24 fractional bits toward zero, exact sum; floor against C; round to nearest even",
    evidence="modelled, equal to mmasim 2.1.1; no MI300X has been available",
    accumulate=accumulate,
)
