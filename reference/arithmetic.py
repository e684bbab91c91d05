"""IEEE 754 binary32 arithmetic, elementwise, round to nearest even, with the treatment of subnormals stated.

Every function takes native float32 arrays or scalars, broadcasts them and returns float32. Where a result is NaN its
sign and payload are not specified: hardware differs, so compare NaN as a class. Signed zeros follow IEEE 754.

`flush` says which subnormals become zeros of the same sign: none (`keep`), those of the `inputs`, those of the
`outputs` (after rounding), or `both`.

Source: IEEE 754-2019 sections 5.4, 6.3 and 9.6; the fused multiply-add through float64: Boldo and Melquiond 2008,
"Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array, require_choice, require_float32

Float64Array = NDArray[np.float64]
Flush = Literal["keep", "inputs", "outputs", "both"]
FLUSHES: tuple[str, ...] = get_args(Flush)

#: An operand of the unchecked functions: float32 values, as float32 or as float64.
Operand = Float32Array | Float64Array | np.float32

#: Smallest normal magnitude of binary32.
MIN_NORMAL = np.float32(2.0**-126)


def flush_subnormals(x: Float32Array) -> Float32Array:
    """`x` with every subnormal replaced by the zero of its sign."""
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(np.float32(0), x), x)


def _apply(operation: Callable[..., Float32Array], flush: Flush, **operands: Float32Array) -> Float32Array:
    """Check the operands, flush what `flush` says, and run `operation` without floating-point warnings."""
    require_choice(flush, "flush", FLUSHES)
    arrays = [require_float32(value, name) for name, value in operands.items()]
    if flush in ("inputs", "both"):
        arrays = [flush_subnormals(array) for array in arrays]
    with np.errstate(all="ignore"):
        result = operation(*arrays)
    return flush_subnormals(result) if flush in ("outputs", "both") else result


def add(a: Float32Array, b: Float32Array, flush: Flush = "keep") -> Float32Array:
    """a + b, one rounding."""
    return _apply(np.add, flush, a=a, b=b)


def sub(a: Float32Array, b: Float32Array, flush: Flush = "keep") -> Float32Array:
    """a - b, one rounding."""
    return _apply(np.subtract, flush, a=a, b=b)


def mul(a: Float32Array, b: Float32Array, flush: Flush = "keep") -> Float32Array:
    """a * b, one rounding."""
    return _apply(np.multiply, flush, a=a, b=b)


def div(a: Float32Array, b: Float32Array, flush: Flush = "keep") -> Float32Array:
    """a / b, one rounding; x / 0 is an infinity, 0 / 0 is NaN."""
    return _apply(np.divide, flush, a=a, b=b)


def sqrt(x: Float32Array, flush: Flush = "keep") -> Float32Array:
    """Square root, one rounding; sqrt(-0) is -0, NaN below zero."""
    return _apply(np.sqrt, flush, x=x)


def fma(a: Float32Array, b: Float32Array, c: Float32Array, flush: Flush = "keep") -> Float32Array:
    """a * b + c with one rounding."""
    return _apply(fused_multiply_add, flush, a=a, b=b, c=c)


def maximum(a: Float32Array, b: Float32Array, flush: Flush = "keep") -> Float32Array:
    """IEEE 754-2019 `maximum`: NaN if either is NaN, and +0 above -0."""
    return _apply(_maximum, flush, a=a, b=b)


def minimum(a: Float32Array, b: Float32Array, flush: Flush = "keep") -> Float32Array:
    """IEEE 754-2019 `minimum`: NaN if either is NaN, and -0 below +0."""
    return _apply(lambda x, y: -_maximum(-x, -y), flush, a=a, b=b)


def less(a: Float32Array, b: Float32Array, flush: Flush = "keep") -> NDArray[np.bool_]:
    """a < b; false when either is NaN; -0 equals +0. `flush` can only concern the inputs."""
    return _compare(np.less, a, b, flush)


def less_equal(a: Float32Array, b: Float32Array, flush: Flush = "keep") -> NDArray[np.bool_]:
    """a <= b; false when either is NaN; -0 equals +0. `flush` can only concern the inputs."""
    return _compare(np.less_equal, a, b, flush)


def equal(a: Float32Array, b: Float32Array, flush: Flush = "keep") -> NDArray[np.bool_]:
    """a == b; false when either is NaN; -0 equals +0. `flush` can only concern the inputs."""
    return _compare(np.equal, a, b, flush)


def _compare(operation: Callable[..., Any], a: Float32Array, b: Float32Array, flush: Flush) -> NDArray[np.bool_]:
    require_choice(flush, "flush", FLUSHES)
    x, y = require_float32(a, "a"), require_float32(b, "b")
    if flush in ("inputs", "both"):
        x, y = flush_subnormals(x), flush_subnormals(y)
    return np.asarray(operation(x, y), np.bool_)


def _maximum(a: Float32Array, b: Float32Array) -> Float32Array:
    # np.maximum propagates NaN but may return either zero; adding two equal values' zeros picks +0 when one is +0
    larger = np.maximum(a, b)
    return np.where((a == 0) & (b == 0), a + b, larger)


def fused_multiply_add(a: Operand, b: Operand, c: Operand) -> Float32Array:
    """FMA without argument checks, for inner loops; call it inside `np.errstate(all="ignore")`.

    Operands hold float32 values, as float32 or, converted once by the caller, as float64.

    The product is exact in float64, so only one rounding precedes the conversion. It can change the result only where
    the float64 sum lies on a boundary between two float32 values: there it is redone by `fma_round_to_odd`.
    """
    total = np.asarray(np.multiply(a, b, dtype=np.float64))
    total = np.asarray(np.add(total, c, dtype=np.float64))
    result = total.astype(np.float32)
    doubtful = _near_float32_boundary(total)
    if doubtful.any():
        a, b, c = np.broadcast_arrays(a, b, c)
        result[doubtful] = fma_round_to_odd(a[doubtful], b[doubtful], c[doubtful])
    return result


def _near_float32_boundary(total: Float64Array) -> NDArray[np.bool_]:
    """Where rounding `total` to float32 could differ from rounding the value that `total` was itself rounded from."""
    # in the normal range a boundary is a one followed by 28 zeros in the last 29 bits
    doubtful = np.asarray(total.view(np.uint64) << np.uint64(35) == np.uint64(1 << 63))
    magnitude = np.abs(total)
    if not magnitude.min(initial=np.inf) >= MIN_NORMAL:
        # below it the boundaries sit elsewhere: redo all; a zero sum is exact
        doubtful |= (magnitude < MIN_NORMAL) & (magnitude != 0)
    return doubtful


def fma_round_to_odd(a: Operand, b: Operand, c: Operand) -> Float32Array:
    """FMA that is correct for every input: float64 product (exact), sum rounded to odd, rounded to float32."""
    with np.errstate(all="ignore"):
        product = np.asarray(np.multiply(a, b, dtype=np.float64))
        return add_round_to_odd(product, np.asarray(c, np.float64)).astype(np.float32)


def two_sum(x: Float64Array, y: Float64Array) -> tuple[Float64Array, Float64Array]:
    """x + y rounded to float64, and its exact error (Knuth's TwoSum)."""
    total = np.asarray(x + y)
    shadow = total - x
    return total, (x - (total - shadow)) + (y - shadow)


def add_round_to_odd(x: Float64Array, y: Float64Array) -> Float64Array:
    """x + y in float64, truncated, with the last bit set when it is inexact: safe to round again to float32."""
    total, error = two_sum(x, y)
    u = total.view(np.int64)
    inexact_even = (error != 0) & ((u & 1) == 0) & np.isfinite(total)
    # integer order follows magnitude, so a step toward a positive error is +1 for positive totals, -1 for negative
    step = np.where((error > 0) == (u >= 0), 1, -1)
    odd: Float64Array = (u + np.where(inexact_even, step, 0)).view(np.float64)
    return odd
