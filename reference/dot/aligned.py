"""Sums of products aligned to a common exponent and truncated: what the fused dot units of CDNA3 and NVIDIA share.

Significands are not normalised after a multiplication: a product of exponents ea and eb has exponent ea + eb and a
significand in [1, 4). All arithmetic here is exact: an aligned and truncated product is an integer below 2^27.

Source: Xie et al. 2025, "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import Float64Array
from reference.checks import Float32Array
from reference.dot.extent import extent
from reference.dot.tiles import contiguous_rows, tiles, unbuffered
from reference.formats import FLOAT32, Format

Exponents = NDArray[np.int16]

#: Exponent of a zero operand: a zero product takes no part in the maximum.
ZERO_EXPONENT = -4096
#: Products between these exponents can be aligned in float32: what underflows there would be truncated anyway.
MODERATE = (-90, 100)


@dataclass(frozen=True)
class Operand:
    """One operand of a tile, K first, filled up by zeros to a multiple of the group."""

    #: float32 [K, rows or columns].
    values: Float32Array
    #: The same with non-finite values replaced by zero.
    finite: Float32Array
    #: int16, the same shape: exponent, clamped from below at the format's smallest normal exponent.
    exponents: Exponents

    def take(self, k: slice) -> Operand:
        """The operand of some k only."""
        return Operand(self.values[k], self.finite[k], self.exponents[k])


#: step(a [group, M], b [group, N], c [M, N]) -> new accumulator [M, N], of finite values.
Step = Callable[[Operand, Operand, Float32Array], Float32Array]


def operand(x: Float32Array, fmt: Format, group: int) -> Operand:
    """Prepare `x` [K, n]."""
    values = np.zeros((x.shape[0] + -x.shape[0] % group, x.shape[1]), np.float32)
    for k, row in enumerate(contiguous_rows(x)):
        values[k] = row
    is_finite = np.isfinite(values)
    finite = values if is_finite.all() else np.where(is_finite, values, np.float32(0))
    own = np.maximum(exponents(finite), np.int16(fmt.min_exponent))
    own[finite == 0] = ZERO_EXPONENT
    return Operand(values, finite, own)


def accumulate_groups(
    a: Float32Array,
    b: Float32Array,
    c: Float32Array,
    fmt: Format,
    group: int,
    step: Step,
    product_limit: float = np.inf,
) -> Float32Array:
    """c + a @ b, `group` consecutive k at a time: float32 a [M, K], b [K, N], c [M, N].

    Args:
        step: one group of finite operands and a finite accumulator to the new accumulator.
        product_limit: products of this magnitude or more count as infinite.
    """
    guarded = may_leave_finite(a, b, c)
    result = np.array(c, np.float32, order="C")
    with np.errstate(all="ignore"):
        for rows, columns, left, right in _operand_tiles(a, b, fmt, group):
            accumulator = result[rows, columns]
            for first in range(0, a.shape[1], group):
                k = slice(first, first + group)
                if guarded:
                    accumulator = _guarded_step(left.take(k), right.take(k), accumulator, step, product_limit)
                else:
                    accumulator = step(left.take(k), right.take(k), accumulator)
            result[rows, columns] = accumulator
    return result


def may_leave_finite(a: Float32Array, b: Float32Array, c: Float32Array) -> bool:
    """Whether some operand, product or partial sum could be infinite or NaN; a cheap bound, true when in doubt."""
    product = extent(a).largest * extent(b).largest
    return not product * (a.shape[1] + 1) + extent(c).largest < 2.0**126  # NaN counts as doubt


def _operand_tiles(
    a: Float32Array, b: Float32Array, fmt: Format, group: int
) -> Iterator[tuple[slice, slice, Operand, Operand]]:
    """Rows, columns and the two operands of every output tile; each operand is prepared once."""
    left: dict[int, Operand] = {}
    previous, right = slice(0, 0), operand(b[:, :0], fmt, group)
    for rows, columns in tiles(a.shape[0], b.shape[1]):
        if rows.start not in left:
            left[rows.start] = operand(a[rows].T, fmt, group)
        if columns != previous:
            previous, right = columns, operand(b[:, columns], fmt, group)
        yield rows, columns, left[rows.start], right


def _guarded_step(a: Operand, b: Operand, c: Float32Array, step: Step, product_limit: float) -> Float32Array:
    """`step` on finite stand-ins, overruled where infinities or NaN decide."""
    result = step(a, b, np.where(np.isfinite(c), c, np.float32(0)))
    special = _non_finite_sum(a, b, c, product_limit)
    return np.where(np.isfinite(special), result, special.astype(np.float32))


def _non_finite_sum(a: Operand, b: Operand, c: Float32Array, product_limit: float) -> Float64Array:
    """c + sum over k of a * b, for its infinities and NaN only."""
    total = c.astype(np.float64)
    for row, column in zip(a.values[:, :, None].astype(np.float64), b.values.astype(np.float64), strict=True):
        product = row * column
        total += np.where(np.abs(product) >= product_limit, np.copysign(np.inf, product), product)
    return total


def exponents(x: Float32Array) -> Exponents:
    """floor(log2 |x|) of finite float32 values, -126 for subnormals and zeros."""
    field = (x.view(np.uint32) >> np.uint32(23)).astype(np.int16)
    field &= np.int16(0xFF)
    np.maximum(field, np.int16(1), out=field)
    field -= np.int16(FLOAT32.bias)
    return field


def power_of_two(n: Exponents) -> Float64Array:
    """2^n as float64, for -1022 <= n <= 1023."""
    bits = n.astype(np.int64)
    bits += 1023
    bits <<= 52
    return bits.view(np.float64)


def largest_exponent(a: Operand, b: Operand, start: Exponents) -> Exponents:
    """max over k of the products' exponents, and `start`: int16 [M, N]."""
    result = start.copy()
    exponent = np.empty_like(result)
    with unbuffered():
        for row, column in zip(a.exponents[:, :, None], b.exponents, strict=True):
            np.add(row, column, out=exponent)
            np.maximum(result, exponent, out=result)
    return result


def truncated_sum(a: Operand, b: Operand, largest: Exponents, fraction_bits: int) -> Float64Array:
    """Sum over k of trunc(a * b * 2^(fraction_bits - largest)), exact and never -0: float64 [M, N].

    Args:
        largest: at least every product's exponent.
    """
    shift = np.int16(fraction_bits) - largest
    if MODERATE[0] <= largest.min() and largest.max() <= MODERATE[1]:
        return _truncated_sum_in_float32(a, b, shift)
    return _truncated_sum_in_float64(a, b, power_of_two(shift))


def _truncated_sum_in_float32(a: Operand, b: Operand, shift: Exponents) -> Float64Array:
    """A product of two short significands is exact in float32; at most 16 integers below 2^27 add up in int32."""
    scale = ((shift.astype(np.int32) + np.int32(FLOAT32.bias)) << np.int32(23)).view(np.float32)
    product = np.empty_like(scale)
    truncated = np.empty(scale.shape, np.int32)
    total = np.zeros(scale.shape, np.int32)
    with unbuffered():
        for row, column in zip(a.finite[:, :, None], b.finite, strict=True):
            np.multiply(row, column, out=product)
            np.multiply(product, scale, out=product)
            np.copyto(truncated, product, casting="unsafe")  # conversion to integer truncates
            np.add(total, truncated, out=total)
    return total.astype(np.float64)


def _truncated_sum_in_float64(a: Operand, b: Operand, scale: Float64Array) -> Float64Array:
    """The same for every exponent."""
    total = np.zeros_like(scale)
    product = np.empty_like(scale)
    for row, column in zip(a.finite[:, :, None].astype(np.float64), b.finite.astype(np.float64), strict=True):
        np.multiply(row, column, out=product)
        np.multiply(product, scale, out=product)
        np.trunc(product, out=product)
        np.add(total, product, out=total)
    return total
