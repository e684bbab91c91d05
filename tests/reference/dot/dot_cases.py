"""Operands that reach the corners of a matrix unit."""

from __future__ import annotations

import numpy as np

from reference.formats import FLOAT32, Format, decode
from reference.rounding import round_to
from tests.reference.bits import Float32Array

KINDS = ("normal", "wide", "powers", "sparse", "tiny", "faint", "large", "cancelling", "borrow", "patterns", "special")


def operands(kind: str, fmt: Format, shape: tuple[int, int, int], seed: int) -> tuple[Float32Array, ...]:
    """a [M, K] and b [K, N] in `fmt`, c [M, N] in float32."""
    M, K, N = shape
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    middle = 0.5 * (fmt.min_exponent + int(np.frexp(fmt.max_finite)[1]))
    spread = 0.4 * (int(np.frexp(fmt.max_finite)[1]) - fmt.min_exponent)

    def values(size: tuple[int, int], is_start: bool = False) -> Float32Array:
        x = rng.standard_normal(size)
        if kind == "wide":
            x = np.ldexp(x, np.rint(rng.uniform(middle - spread, middle + spread, size)).astype(int))
        elif kind == "powers":
            x = np.sign(x) * 2.0 ** rng.integers(-3, 3, size)
        elif kind == "sparse":
            x = np.where(rng.random(size) < 0.3, x, np.copysign(0.0, x))
        elif kind == "tiny":
            x = x * FLOAT32.min_normal * 2.0 ** rng.integers(-3, 3, size) if is_start else tiny(x)
        elif kind == "faint":  # products around half the smallest subnormal: only their sum can be seen
            power = rng.integers(-77, -73, size) if fmt.exponent_bits == 8 else fmt.min_exponent
            x = np.rint(x * 3) * 2.0**-149 if is_start else np.ldexp(x, power)
        elif kind == "large":
            limit = rng.integers(57, 63, size) if fmt.exponent_bits == 8 else int(np.frexp(fmt.max_finite)[1]) - 2
            x = np.ldexp(x, 127 if is_start and fmt.exponent_bits == 8 else limit)
        return round_to(x, FLOAT32 if is_start else fmt, overflow="saturate")

    def tiny(x: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Products around the smallest float32 values, or subnormal operands of a format too narrow for that."""
        return x * max(2.0**-68, fmt.min_subnormal * 4) * 2.0 ** rng.integers(-8, 8, x.shape)

    if kind in ("patterns", "special"):
        a, b = (decode(rng.integers(0, 1 << fmt.bits, size).astype(fmt.storage), fmt) for size in ((M, K), (K, N)))
        c = rng.integers(0, 1 << 32, (M, N), dtype=np.uint64).astype(np.uint32).view(np.float32)
        if kind == "patterns":
            # halve the exponent range, so that most results are finite
            a, b = (
                (round_to(np.sign(x) * np.sqrt(np.abs(np.nan_to_num(x, posinf=1, neginf=1))), fmt) for x in (a, b))
                if fmt.has_infinity
                else (np.nan_to_num(a), np.nan_to_num(b))
            )
            c = np.where(np.isfinite(c), c, np.float32(-0.0))
        return a, b, c
    a, b, c = values((M, K)), values((K, N)), values((M, N), is_start=True)
    if kind == "cancelling":
        c = -(a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    elif kind == "borrow":
        # a power of two minus little: the sum's leading bit falls below the accumulator's exponent
        exponent = rng.integers(6, 14, (M, N))
        c = np.ldexp(np.float32(1), exponent).astype(np.float32) * rng.choice(np.array([-1, 1], np.float32), (M, N))
    return a, b, c


def borrow_from_accumulator(sign: float) -> tuple[Float32Array, ...]:
    """One CDNA3 group whose sum needs 32 fractional bits below the accumulator's exponent.

    C = 2^8 and S = -(3 * 2^-17 - 2^-24): the sum lies 2^-24 above a tie between an odd and an even value, one binade
    below C. With one bit less, S would floor onto the tie and round to even.
    """
    a = np.array([[-3 * 2.0**-17, 2.0**-24, 0, 0, 0, 0, 0, 0]], np.float32) * np.float32(sign)
    return a, np.ones((8, 1), np.float32), np.array([[sign * 2.0**8]], np.float32)
