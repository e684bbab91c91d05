"""Rounding of float32 or float64 values to a format, in one step, with the mode and the overflow policy stated.

`round_scalar` is the specification, in exact fractions; `round_to` is its vectorised twin.

Sources: IEEE 754-2019 section 4.3 (rne, rtz, rna); Boldo and Melquiond 2008 (round to odd); the stochastic rule adds
random bits below the last kept bit, as `v_cvt_sr_*` of gfx942 and `cvt.rs` of sm_100 do.
"""

from __future__ import annotations

from fractions import Fraction
from math import copysign, floor, isinf, isnan
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array, require_choice, require_dtype
from reference.formats import Format, canonical_nan

#: `rne` nearest, ties to even; `rtz` toward zero; `rna` nearest, ties away from zero; `odd` truncate, and set the last
#: bit if anything was lost; `stochastic` up with the probability of the discarded fraction.
Mode = Literal["rne", "rtz", "rna", "odd", "stochastic"]

#: What an infinity, or a finite value that rounds beyond the largest finite one, becomes. `infinity`: IEEE 754, which
#: is the largest finite value for finite inputs of `rtz` and `odd`. `saturate`: the largest finite value. `nan`: NaN.
Overflow = Literal["infinity", "saturate", "nan"]

MODES: tuple[str, ...] = get_args(Mode)
OVERFLOWS: tuple[str, ...] = get_args(Overflow)

#: Elements rounded at a time, so that the temporaries stay in cache.
BLOCK = 16384
#: Random bits per element of stochastic rounding.
STOCHASTIC_BITS = 32


def round_to(
    x: NDArray[Any],
    fmt: Format,
    mode: Mode = "rne",
    overflow: Overflow = "infinity",
    random_bits: NDArray[np.uint32] | None = None,
) -> Float32Array:
    """Round `x` to values of `fmt`, once: a float64 input does not pass through float32.

    Subnormals of the format are kept. A zero result keeps the sign of its input where the format has -0. A NaN
    becomes the canonical one (`canonical_nan`), of the same sign where the format has signed NaN.

    Args:
        x: float32 or float64, any shape.
        random_bits: uint32, the shape of `x`; for `stochastic` only. The value rounds up in magnitude when
            floor(discarded fraction * 2^32) + random_bits >= 2^32.

    Returns:
        float32 values of the shape of `x`, each a value of `fmt`.

    Raises:
        TypeError: dtype or byte order of `x` or `random_bits`.
        ValueError: unknown mode or policy; `infinity` for a format without infinities; `random_bits` missing, of
            another shape, or given to a mode that takes none.
    """
    values = require_dtype(x, "x", np.float32, np.float64)
    _check_policy(fmt, mode, overflow, random_bits is not None)
    if random_bits is not None and np.shape(require_dtype(random_bits, "random_bits", np.uint32)) != values.shape:
        raise ValueError(f"random_bits: shape {np.shape(random_bits)} differs from the shape {values.shape} of x")
    if mode == "rne" and overflow == "infinity":
        if fmt.mantissa_bits == 23:
            with np.errstate(all="ignore"):
                return canonical_nan(values.astype(np.float32))
        if fmt.exponent_bits == 8 and values.dtype == np.float32:
            return _round_prefix(values, 23 - fmt.mantissa_bits)
    flat = np.ascontiguousarray(values).reshape(-1)
    bits = None if random_bits is None else np.ascontiguousarray(random_bits).reshape(-1)
    result = np.empty(flat.shape, np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, BLOCK):
            block = slice(start, start + BLOCK)
            random = None if bits is None else bits[block]
            result[block] = _round_block(flat[block].astype(np.float64), fmt, mode, overflow, random)
    return result.reshape(values.shape)


def _round_prefix(x: Float32Array, dropped: int) -> Float32Array:
    """RNE of float32 to a format that is a prefix of it (bfloat16, tfloat32), by integer addition."""
    u = np.ascontiguousarray(x).view(np.uint32)
    last_kept = (u >> np.uint32(dropped)) & np.uint32(1)
    rounded = u + (np.uint32((1 << (dropped - 1)) - 1) + last_kept)
    rounded &= np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    is_nan = np.isnan(x).reshape(u.shape)
    if is_nan.any():  # the addition may have carried a NaN into another value
        rounded[is_nan] = u[is_nan]
    return canonical_nan(rounded.view(np.float32).reshape(x.shape))


def _round_block(
    x: NDArray[np.float64], fmt: Format, mode: Mode, overflow: Overflow, random_bits: NDArray[np.uint32] | None
) -> NDArray[np.float64]:
    """Any mode and policy, on a one-dimensional block; every operation but the rounding itself is exact."""
    exponent = ((x.view(np.int64) >> 52) & 0x7FF) - 1023
    last_place = np.maximum(exponent, fmt.min_exponent) - fmt.mantissa_bits
    scaled = np.abs(x) * _power_of_two(-last_place)  # below 2^(mantissa_bits + 1)
    rounded = _round_to_integer(scaled, mode, random_bits) * _power_of_two(last_place)
    outside = ~(rounded <= fmt.max_finite)  # NaN included
    if outside.any():
        rounded = np.where(outside, _outside(x, fmt, mode, overflow), rounded)
    if fmt.has_negative_zero:
        return np.copysign(rounded, x)
    return np.where((rounded == 0) | np.isnan(rounded), np.abs(rounded), np.copysign(rounded, x))


def _power_of_two(n: NDArray[np.int64]) -> NDArray[np.float64]:
    return ((n + 1023) << 52).view(np.float64)


def _round_to_integer(
    scaled: NDArray[np.float64], mode: Mode, random_bits: NDArray[np.uint32] | None
) -> NDArray[np.float64]:
    """Nonnegative values to integers."""
    if mode == "rne":
        return np.asarray(np.rint(scaled))
    kept = np.floor(scaled)
    fraction = scaled - kept  # exact
    if mode == "rtz":
        return np.asarray(kept)
    if mode == "rna":
        return np.asarray(kept + (fraction >= 0.5))
    if mode == "odd":
        return np.asarray(kept + ((fraction > 0) & (np.floor(kept * 0.5) * 2 == kept)))
    assert random_bits is not None
    carries = np.floor(fraction * 2.0**STOCHASTIC_BITS) + random_bits >= 2.0**STOCHASTIC_BITS
    return np.asarray(kept + carries)


def _outside(x: NDArray[np.float64], fmt: Format, mode: Mode, overflow: Overflow) -> NDArray[np.float64]:
    """Magnitude that replaces each NaN, and each value that rounds beyond the largest finite one."""
    finite = _overflow_magnitude(False, fmt, mode, overflow)
    infinite = _overflow_magnitude(True, fmt, mode, overflow)
    return np.where(np.isnan(x), np.nan, np.where(np.isinf(x), infinite, finite))


def _overflow_magnitude(from_infinity: bool, fmt: Format, mode: Mode, overflow: Overflow) -> float:
    """What an infinity, or a finite value too large, becomes."""
    if overflow == "nan":
        return float("nan")
    if overflow == "saturate" or (mode in ("rtz", "odd") and not from_infinity):
        return fmt.max_finite
    return float("inf")


def round_scalar(
    x: float | Fraction,
    fmt: Format,
    mode: Mode = "rne",
    overflow: Overflow = "infinity",
    random_bits: int | None = None,
) -> float:
    """Round one float64 value or exact fraction to `fmt`: the specification of `round_to`, in exact fractions.

    Raises:
        ValueError: as `round_to`.
    """
    _check_policy(fmt, mode, overflow, random_bits is not None)
    sign = copysign(1.0, x)
    if isnan(x):
        return _signed(float("nan"), sign, fmt)
    if isinf(x):
        return _signed(_overflow_magnitude(True, fmt, mode, overflow), sign, fmt)
    exact = abs(Fraction(x))
    last_place = Fraction(2) ** (max(_exponent(exact), fmt.min_exponent) - fmt.mantissa_bits)
    kept = floor(exact / last_place)
    fraction = exact / last_place - kept
    up = {
        "rne": fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and kept % 2 == 1),
        "rtz": False,
        "rna": fraction >= Fraction(1, 2),
        "odd": fraction > 0 and kept % 2 == 0,
        "stochastic": floor(fraction * 2**STOCHASTIC_BITS) + (random_bits or 0) >= 2**STOCHASTIC_BITS,
    }[mode]
    rounded = (kept + up) * last_place
    if rounded > Fraction(fmt.max_finite):
        return _signed(_overflow_magnitude(False, fmt, mode, overflow), sign, fmt)
    return _signed(float(rounded), sign, fmt)


def _signed(magnitude: float, sign: float, fmt: Format) -> float:
    """`magnitude` with `sign`; the format without -0 has neither a negative zero nor a negative NaN."""
    is_unsigned = (magnitude == 0 or isnan(magnitude)) and not fmt.has_negative_zero
    return magnitude if is_unsigned else copysign(magnitude, sign)


def _exponent(value: Fraction) -> int:
    """floor(log2(value)) of a positive fraction; a very small number for zero."""
    if value == 0:
        return -(10**6)
    estimate = value.numerator.bit_length() - value.denominator.bit_length()
    return estimate if value >= Fraction(2) ** estimate else estimate - 1


def _check_policy(fmt: Format, mode: str, overflow: str, has_random_bits: bool) -> None:
    require_choice(mode, "mode", MODES)
    require_choice(overflow, "overflow", OVERFLOWS)
    if overflow == "infinity" and not fmt.has_infinity:
        raise ValueError(f"overflow: {fmt.name} has no infinity; choose 'saturate' or 'nan'")
    if (mode == "stochastic") != has_random_bits:
        need = "needs" if mode == "stochastic" else "takes no"
        raise ValueError(f"random_bits: mode {mode!r} {need} random bits")
