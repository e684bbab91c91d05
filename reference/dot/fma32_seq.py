"""`fma32-seq`: one float32 FMA per k, ascending K. The only unit whose bits every vendor can produce."""

from __future__ import annotations

import numpy as np

from reference.arithmetic import fused_multiply_add
from reference.checks import Float32Array
from reference.dot.extent import extent
from reference.dot.tiles import contiguous_rows, tiles, unbuffered
from reference.dot.unit import MatrixUnit
from reference.formats import FLOAT32, Format


def accumulate(a: Float32Array, b: Float32Array, c: Float32Array, input_format: Format) -> Float32Array:
    """c + a @ b with one FMA per k: float32 a [M, K], b [K, N], c [M, N]."""
    result = np.array(c, np.float32, order="C")
    step = _multiply_then_add if products_are_exact(a, b) else _fused
    with np.errstate(all="ignore"):
        for rows, columns in tiles(*result.shape):
            step(a[rows].T, b[:, columns], result[rows, columns])
    return result


def products_are_exact(a: Float32Array, b: Float32Array) -> bool:
    """Whether every finite product a * b is a float32, so that a float32 multiplication and addition is an FMA.

    True when two significands together have at most 24 bits, and no product can underflow or overflow.
    """
    left, right = extent(a), extent(b)
    return (
        left.significant_bits + right.significant_bits <= FLOAT32.mantissa_bits + 1
        and left.last_place * right.last_place >= FLOAT32.min_subnormal
        and left.largest * right.largest < 2.0**127
    )


def _multiply_then_add(a: Float32Array, b: Float32Array, accumulator: Float32Array) -> None:
    """Rank-one updates of a tile: a [K, M], b [K, N]; exact products, so each update is an FMA."""
    total = np.ascontiguousarray(accumulator)
    product = np.empty_like(total)
    with unbuffered():
        for left, right in zip(contiguous_rows(a), contiguous_rows(b), strict=True):
            np.multiply(left[:, None], right, out=product)
            np.add(total, product, out=total)
    accumulator[...] = total


def _fused(a: Float32Array, b: Float32Array, accumulator: Float32Array) -> None:
    """Rank-one updates of a tile by `fused_multiply_add`: a [K, M], b [K, N]."""
    for left, right in zip(contiguous_rows(a), contiguous_rows(b), strict=True):
        accumulator[...] = fused_multiply_add(left[:, None].astype(np.float64), right.astype(np.float64), accumulator)


UNIT = MatrixUnit(
    name="fma32-seq",
    hardware="gfx942 float32 MFMA, sm_90 FFMA, NumPy",
    input_formats=("float32", "tfloat32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    arithmetic="per k, ascending: accumulator = fma(a, b, accumulator), round to nearest even, subnormals kept",
    evidence="by construction: IEEE 754 FMA; measured on one H200 with fp32 `tl.dot` (input_precision='ieee')",
    accumulate=accumulate,
)
