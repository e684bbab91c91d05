"""`mfma-cdna3-g8`: gfx942 MFMA (MI300X), groups of 8 consecutive k for bfloat16 and float16.

tfloat32 takes groups of 4, e4m3fnuz groups of 16, float32 one FMA per k. A zero product takes no part in an alignment.

Source: Xie et al. 2025, "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores"; the arithmetic is
restated here over whole tiles.
"""

from __future__ import annotations

import numpy as np

from reference.arithmetic import Float64Array
from reference.checks import Float32Array
from reference.dot import fma32_seq
from reference.dot.aligned import (
    Exponents,
    Operand,
    accumulate_groups,
    exponents,
    largest_exponent,
    power_of_two,
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
    step = _step_8_bit if input_format.bits == 8 else _step
    return accumulate_groups(a, b, c, input_format, GROUPS[input_format.name], step, PRODUCT_LIMIT)


def _step(a: Operand, b: Operand, c: Float32Array) -> Float32Array:
    """One group."""
    total, exponent = _sum_products(a, b)
    return _add_accumulator(total, exponent, c, exponents(c))


def _step_8_bit(a: Operand, b: Operand, c: Float32Array) -> Float32Array:
    """One group of an 8-bit format: even and odd k sum apart, each against its own largest exponent, and both floor to
    the larger; an accumulator below the last bit but one counts as zero, where flooring a negative one would give -1.
    """
    parts = [_sum_products(a.take(slice(first, None, 2)), b.take(slice(first, None, 2))) for first in (0, 1)]
    largest = np.maximum(parts[0][1], parts[1][1])
    even, odd = (np.floor(total * power_of_two(exponent - largest)) for total, exponent in parts)
    own = exponents(c)
    kept = np.where(own < np.maximum(largest, own) - np.int16(FRACTION_BITS + 1), np.float32(0), c)
    return _add_accumulator(even + odd, largest, kept, own)


def _sum_products(a: Operand, b: Operand) -> tuple[Float64Array, Exponents]:
    """Exact sum of the truncated products, in units of 2^(exponent - 24), and that exponent."""
    start = np.full((a.values.shape[1], b.values.shape[1]), LEAST_EXPONENT, np.int16)
    largest = largest_exponent(a, b, start)
    return truncated_sum(a, b, largest, FRACTION_BITS), largest


def _add_accumulator(total: Float64Array, exponent: Exponents, c: Float32Array, own: Exponents) -> Float32Array:
    """Floor the products' sum and the accumulator, of exponent `own`, against the larger exponent; add; round."""
    common = np.maximum(exponent, own)
    total *= power_of_two(exponent + np.int16(SUM_BITS - FRACTION_BITS) - common)
    np.floor(total, out=total)
    addend = c * power_of_two(np.int16(FRACTION_BITS) - common)
    np.floor(addend, out=addend)
    addend *= 2.0 ** (SUM_BITS - FRACTION_BITS)
    total += addend
    total *= power_of_two(common - np.int16(SUM_BITS))
    return _round_sum(total)


def _round_sum(x: Float64Array) -> Float32Array:
    """Floor to 32 significant bits, or to the spacing they have at 2^-126, then round to nearest even."""
    dropped = np.int64((1 << (53 - SIGNIFICANT_BITS)) - 1)
    # integer order follows magnitude: flooring a negative value adds to its bits
    u = x.view(np.int64)
    bits = u >> np.int64(63)
    bits &= dropped
    bits += u
    bits &= ~dropped
    floored = bits.view(np.float64)
    if np.abs(x).min(initial=np.inf) < FLOAT32.min_normal:
        subnormal = np.abs(x) < FLOAT32.min_normal
        spacing = 2.0 ** (FLOAT32.min_exponent - SIGNIFICANT_BITS + 1)
        floored = np.where(subnormal, np.floor(x / spacing) * spacing, floored)
    return floored.astype(np.float32)


UNIT = MatrixUnit(
    name="mfma-cdna3-g8",
    hardware="gfx942 v_mfma_f32_16x16x16 and 32x32x8 (bf16, f16), 32x32x4_xf32, 16x16x32_fp8_fp8, 32x32x2_f32",
    input_formats=("float32", "tfloat32", "bfloat16", "float16", "float8_e4m3fnuz"),
    arithmetic="8 products aligned, 24 fractional bits toward zero, exact sum; floor against C; round to nearest even",
    evidence="modelled, equal to mmasim 2.1.1; no MI300X has been available",
    accumulate=accumulate,
)
