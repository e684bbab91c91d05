"""Sums of products aligned to a common exponent and truncated: what the fused dot units of CDNA3 and NVIDIA share.

Significands are not normalised after a multiplication: a product of exponents ea and eb has exponent ea + eb and a
significand in [1, 4). All arithmetic here is exact in float64: aligned products are integers below 2^33.

Source: Xie et al. 2025, "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.formats import Format

Float64Array = NDArray[np.float64]
Exponents = NDArray[np.int16]

#: Exponent of a zero operand: a zero product takes no part in the maximum.
ZERO_EXPONENT = -4096
#: Rows and columns of an output tile: its float64 arrays stay in the L2 cache.
TILE = (64, 128)


@dataclass(frozen=True)
class Operand:
    """One operand of a tile, K first: values, exponents, and the finite values (non-finite ones as zero)."""

    #: float64 [K, rows or columns].
    values: Float64Array
    #: int16, the same shape: exponent, clamped from below at the format's smallest normal exponent.
    exponents: Exponents
    #: float64, the same shape.
    finite: Float64Array
    #: Whether `finite` is `values`.
    all_finite: bool

    def group(self, start: int, size: int) -> Operand:
        """`size` consecutive k from `start`."""
        k = slice(start, start + size)
        return Operand(self.values[k], self.exponents[k], self.finite[k], self.all_finite)


def operand(x: Float32Array, fmt: Format, group: int) -> Operand:
    """Prepare `x` [K, n], with K filled up by zeros to a multiple of `group`."""
    values = np.zeros((x.shape[0] + -x.shape[0] % group, x.shape[1]), np.float64)
    values[: x.shape[0]] = x
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, 0.0)
    return Operand(values, exponents(finite, fmt), finite, bool(is_finite.all()))


def exponents(x: NDArray[np.floating], fmt: Format) -> Exponents:
    """floor(log2 |x|) of finite values, at least the smallest normal exponent of `fmt`; `ZERO_EXPONENT` for zeros."""
    exponent = np.maximum(np.frexp(x)[1] - 1, fmt.min_exponent)
    return np.where(x == 0, ZERO_EXPONENT, exponent).astype(np.int16)


def power_of_two(n: NDArray[np.integer]) -> Float64Array:
    """2^n as float64, for -1022 <= n <= 1023."""
    return ((n.astype(np.int64) + 1023) << 52).view(np.float64)


def largest_exponent(a: Operand, b: Operand, start: Exponents) -> Exponents:
    """max over k of the products' exponents, and `start`: int16 [M, N]."""
    result = start.copy()
    exponent = np.empty_like(result)
    for row, column in zip(a.exponents[:, :, None], b.exponents, strict=True):
        np.add(row, column, out=exponent)
        np.maximum(result, exponent, out=result)
    return result


def truncated_sum(a: Operand, b: Operand, scale: Float64Array) -> Float64Array:
    """Sum over k of trunc(a * b * scale), exact; never -0. float64 [M, N]."""
    total = np.zeros_like(scale)
    term = np.empty_like(scale)
    for row, column in zip(a.finite[:, :, None], b.finite, strict=True):
        np.multiply(row, column, out=term)
        np.multiply(term, scale, out=term)
        np.trunc(term, out=term)
        np.add(total, term, out=total)
    return total


def non_finite_sum(a: Operand, b: Operand, c: Float32Array, product_limit: float = np.inf) -> Float64Array:
    """c + sum over k of a * b, for its infinities and NaN: products of `product_limit` or more count as infinite."""
    total = c.astype(np.float64)
    for row, column in zip(a.values[:, :, None], b.values, strict=True):
        product = row * column
        total += np.where(np.abs(product) >= product_limit, np.copysign(np.inf, product), product)
    return total


def may_leave_finite(a: Float32Array, b: Float32Array, c: Float32Array) -> bool:
    """Whether some operand, product or partial sum could be infinite or NaN; a cheap bound, true when in doubt."""
    if not all(np.isfinite(x).all() for x in (a, b, c)):
        return True
    product = float(np.abs(a).max(initial=0)) * float(np.abs(b).max(initial=0))
    return product * (a.shape[1] + 1) + float(np.abs(c).max(initial=0)) >= 2.0**126


def tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the output tiles."""
    for i in range(0, rows, TILE[0]):
        for j in range(0, columns, TILE[1]):
            yield slice(i, i + TILE[0]), slice(j, j + TILE[1])
