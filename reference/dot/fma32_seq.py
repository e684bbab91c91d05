"""`fma32-seq`: one float32 FMA per k, ascending K. The only unit whose bits every vendor can produce."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.dot.unit import MatrixUnit
from reference.formats import Format

#: Edge of the output tiles: accumulator and product of a tile stay in the L2 cache.
TILE = 256


def accumulate(a: Float32Array, b: Float32Array, c: Float32Array, input_format: Format) -> Float32Array:
    """c + a @ b with one FMA per k: float32 a [M, K], b [K, N], c [M, N]."""
    result = np.array(c, np.float32, order="C")
    step = _multiply_then_add if products_are_exact(a, b) else _fused
    with np.errstate(all="ignore"):
        for rows, columns in tiles(*result.shape):
            step(np.ascontiguousarray(a[rows].T), np.ascontiguousarray(b[:, columns]), result[rows, columns])
    return result


def tiles(rows: int, columns: int, edge: int = TILE) -> Iterator[tuple[slice, slice]]:
    """Slices of the output tiles."""
    for i in range(0, rows, edge):
        for j in range(0, columns, edge):
            yield slice(i, i + edge), slice(j, j + edge)


def products_are_exact(a: Float32Array, b: Float32Array) -> bool:
    """Whether every finite product a * b is a float32, so that a float32 multiplication and addition is an FMA.

    True when the significands together have at most 24 bits, and no product underflows or overflows.
    """
    least_a, greatest_a = _last_and_first_bits(a)
    least_b, greatest_b = _last_and_first_bits(b)
    width = (greatest_a - least_a).max(initial=0) + (greatest_b - least_b).max(initial=0) + 2
    smallest = least_a.min(initial=0) + least_b.min(initial=0)
    largest = greatest_a.max(initial=0) + greatest_b.max(initial=0)
    return bool(width <= 24 and smallest >= -149 and largest <= 126)


def _last_and_first_bits(x: Float32Array) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Exponents of the last and of the first set bit of every finite nonzero element."""
    finite = x[np.isfinite(x) & (x != 0)]
    significand, exponent = np.frexp(finite)
    integer = np.ldexp(significand, 24).astype(np.int32)
    last = integer & -integer
    return exponent - 24 + (np.frexp(last.astype(np.float32))[1] - 1), exponent - 1


def _multiply_then_add(a: Float32Array, b: Float32Array, accumulator: Float32Array) -> None:
    """Rank-one updates of a tile: a [K, M], b [K, N]; exact products, so each update is an FMA."""
    total = np.ascontiguousarray(accumulator)
    product = np.empty_like(total)
    for column, row in zip(a[:, :, None], b, strict=True):
        np.multiply(column, row, out=product)
        np.add(total, product, out=total)
    accumulator[...] = total


def _fused(a: Float32Array, b: Float32Array, accumulator: Float32Array) -> None:
    """Rank-one updates of a tile by `fused_multiply_add`: a [K, M], b [K, N]."""
    for column, row in zip(a[:, :, None], b, strict=True):
        accumulator[...] = fused_multiply_add(column, row, accumulator)


UNIT = MatrixUnit(
    name="fma32-seq",
    hardware="gfx942 float32 MFMA, sm_90 FFMA, NumPy",
    input_formats=("float32", "tfloat32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    arithmetic="per k, ascending: accumulator = fma(a, b, accumulator), round to nearest even, subnormals kept",
    evidence="by construction: IEEE 754 FMA; measured on one H200 with fp32 `tl.dot` (input_precision='ieee')",
    accumulate=accumulate,
)
