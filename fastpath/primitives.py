# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Numerical primitives as Triton device functions: the operations of `reference.primitives`, one for one.

Nothing here is `tl.exp`, `tl.log`, `tl.rsqrt` or a library call: those are hardware approximations. Every operation is
an IEEE addition, multiplication, FMA, division or square root, or works on bits, so every target gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpath.backend import INTERPRETED


def _constant(hexadecimal: str) -> tl.constexpr:
    return tl.constexpr(float.fromhex(hexadecimal))


_INTERPRETED = tl.constexpr(INTERPRETED)

#: Adding and subtracting it rounds to an integer, which then is its low bits: 1.5 * 2^23.
TO_INTEGER = _constant("0x1.8p23")
TO_INTEGER_BITS = tl.constexpr(0x4B400000)
INFINITY = tl.constexpr(float("inf"))
#: Below every key of `ordered`.
LOWEST = tl.constexpr(-(2**31))

LOG2_E = _constant("0x1.715476p0")
LN2_HIGH = _constant("0x1.62e400p-1")
LN2_LOW = _constant("0x1.7f7d1cp-20")
MINUS_LN2_HIGH = _constant("-0x1.62e400p-1")
MINUS_LN2_LOW = _constant("-0x1.7f7d1cp-20")
EXP_OVERFLOW = _constant("0x1.62e430p6")
EXP_UNDERFLOW = _constant("-0x1.9fe36ap6")
EXP_6 = _constant("0x1.6a4d60p-10")
EXP_5 = _constant("0x1.12398ep-7")
EXP_4 = _constant("0x1.5558b0p-5")
EXP_3 = _constant("0x1.555492p-3")
EXP_2 = _constant("0x1.fffffcp-2")

EXP2_OVERFLOW = tl.constexpr(128.0)
EXP2_UNDERFLOW = tl.constexpr(-150.0)
EXP2_LOWEST = tl.constexpr(-152.0)
EXP2_FLOOR = tl.constexpr(-127.0)
EXP2_6 = _constant("0x1.416b52p-13")
EXP2_5 = _constant("0x1.5f082ep-10")
EXP2_4 = _constant("0x1.3b2de0p-7")
EXP2_3 = _constant("0x1.c6af7cp-5")
EXP2_2 = _constant("0x1.ebfbdcp-3")
EXP2_1 = _constant("0x1.62e430p-1")

DIVISION_SCALE = _constant("0x1p64")
DIVISION_UNSCALE = _constant("0x1p-64")

MIN_NORMAL = _constant("0x1p-126")
SUBNORMAL_SCALE = _constant("0x1p23")
EXPONENT_UNIT = _constant("0x1p-23")
TWO_THIRDS = tl.constexpr(0x3F2AAAAB)
EXPONENT_FIELD = tl.constexpr(-0x00800000)
LOG_8 = _constant("-0x1.07c894p-3")
LOG_7 = _constant("0x1.1e678cp-3")
LOG_6 = _constant("-0x1.f332f8p-4")
LOG_5 = _constant("0x1.1ed662p-3")
LOG_4 = _constant("-0x1.559c44p-3")
LOG_3 = _constant("0x1.99d044p-3")
LOG_2 = _constant("-0x1.fffefcp-3")
LOG_1 = _constant("0x1.555506p-2")
LOG_0 = _constant("-0x1p-1")


@triton.jit
def bits(x):
    """The int32 bit pattern of float32 ``x``."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(u):
    """The float32 with the bit pattern ``u`` (int32)."""
    return u.to(tl.float32, bitcast=True)


@triton.jit
def negative(x):
    """-x, zeros included: Triton before 3.9 computes a minus as 0 - x."""
    return from_bits(bits(x) ^ -0x80000000)


@tl.core.builtin
def _compiles_for_amd(_semantic=None):
    return tl.constexpr(_semantic.builder.options.backend_name == "hip")


@triton.jit
def div_rn(x, y):
    """x / y of float32, rounded to nearest even; Triton's ``/`` on CUDA is not.

    On AMD through float64. LLVM's float32 sequence ends with a step that rounds correctly only if the refined
    reciprocal did (Markstein's theorem), which for a divisor of significand 2 - 2^-23 asks more of ``v_rcp_f32`` than
    its documented unit in the last place. Any float64 quotient within one unit of its own last place gives the same
    float32: a quotient of two float32 is a midpoint of float32 exactly (and then exact in float64), or more than
    2^-49 of its size away from every one.
    """
    if _INTERPRETED:
        return tl.math.div_rn(x, y)
    else:
        if _compiles_for_amd():
            # LLVM takes a float64 division between conversions for a float32 one; two exact factors keep it
            quotient = (tl.cast(x, tl.float64) * DIVISION_SCALE) / tl.cast(y, tl.float64)
            return (quotient * DIVISION_UNSCALE).to(tl.float32)
        else:
            return tl.math.div_rn(x, y)


@triton.jit
def sqrt_rn(x):
    """Square root rounded to nearest even."""
    return tl.math.sqrt_rn(x)


@triton.jit
def round_bf16(x):
    """float32 to bfloat16, to nearest even."""
    if _INTERPRETED:  # its cast truncates, and loses subnormals: round on bits
        u = bits(x)
        rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def widen(x):
    """bfloat16 or float32 ``x`` as float32, exactly."""
    if _INTERPRETED and x.dtype == tl.bfloat16:  # its cast is wrong for subnormals
        return from_bits(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 ``x`` in ``dtype``, tl.float32 or tl.bfloat16; to nearest even."""
    if dtype == tl.bfloat16:
        return round_bf16(x)
    else:
        return x


@triton.jit
def power_of_two(n):
    """2^n as float32 for int32 n, -126 <= n <= 127."""
    return from_bits((n + 127) << 23)


@triton.jit
def scale_by_power_of_two(x, n):
    """(x * 2^(n >> 1)) * 2^(n - (n >> 1)): two factors, for one rounding and no early overflow."""
    half = n >> 1
    return (x * power_of_two(half)) * power_of_two(n - half)


@triton.jit
def exp_polynomial(r):
    """e^r for |r| <= ln(2)/2."""
    p = tl.fma(r, EXP_6, EXP_5)
    p = tl.fma(p, r, EXP_4)
    p = tl.fma(p, r, EXP_3)
    p = tl.fma(p, r, EXP_2)
    p = tl.fma(p, r, 1.0)
    return tl.fma(p, r, 1.0)


@triton.jit
def exp(x):
    """e^x: `reference.primitives.exp`."""
    reduced = tl.where(x > EXP_OVERFLOW, EXP_OVERFLOW, tl.where(x < EXP_UNDERFLOW, EXP_UNDERFLOW, x))
    shifted = tl.fma(reduced, LOG2_E, TO_INTEGER)
    k = shifted - TO_INTEGER
    r = tl.fma(k, MINUS_LN2_HIGH, reduced)
    r = tl.fma(k, MINUS_LN2_LOW, r)
    # NaN has no integer, but the polynomial is NaN then and no factor changes that
    result = scale_by_power_of_two(exp_polynomial(r), bits(shifted) - TO_INTEGER_BITS)
    result = tl.where(x > EXP_OVERFLOW, INFINITY, result)
    return tl.where(x < EXP_UNDERFLOW, 0.0, result)


@triton.jit
def exp2_polynomial(r):
    """2^r for |r| <= 1/2."""
    p = tl.fma(r, EXP2_6, EXP2_5)
    p = tl.fma(p, r, EXP2_4)
    p = tl.fma(p, r, EXP2_3)
    p = tl.fma(p, r, EXP2_2)
    p = tl.fma(p, r, EXP2_1)
    return tl.fma(p, r, 1.0)


@triton.jit
def exp2(x):
    """2^x: `reference.primitives.exp2`."""
    reduced = tl.where(x > EXP2_OVERFLOW, EXP2_OVERFLOW, tl.where(x < EXP2_LOWEST, EXP2_LOWEST, x))
    shifted = reduced + TO_INTEGER
    k = shifted - TO_INTEGER
    result = scale_by_power_of_two(exp2_polynomial(reduced - k), bits(shifted) - TO_INTEGER_BITS)
    result = tl.where(x >= EXP2_OVERFLOW, INFINITY, result)
    return tl.where(x < EXP2_UNDERFLOW, 0.0, result)


@triton.jit
def exp2_nonpositive(x):
    """2^x for x <= 0, +0 from -127 down: `reference.primitives.exp2_nonpositive`."""
    reduced = tl.where(x < EXP2_FLOOR, EXP2_FLOOR, x)
    shifted = reduced + TO_INTEGER
    p = exp2_polynomial(reduced - (shifted - TO_INTEGER))
    result = from_bits((bits(shifted) << 23) + bits(p))
    result = tl.where(reduced == EXP2_FLOOR, 0.0, result)
    return tl.where(x == x, result, x)


@triton.jit
def log(x):
    """Natural logarithm: `reference.primitives.log`."""
    subnormal = x < MIN_NORMAL
    positive = tl.where(subnormal, x * SUBNORMAL_SCALE, x)
    scale = tl.where(subnormal, -23.0, 0.0)
    u = bits(positive)
    exponent = (u - TWO_THIRDS) & EXPONENT_FIELD
    f = from_bits(u - exponent) - 1.0
    e = tl.fma(exponent.to(tl.float32), EXPONENT_UNIT, scale)
    square = f * f
    p = tl.fma(f, LOG_8, LOG_7)
    p = tl.fma(p, f, LOG_6)
    p = tl.fma(p, f, LOG_5)
    p = tl.fma(p, f, LOG_4)
    p = tl.fma(p, f, LOG_3)
    p = tl.fma(p, f, LOG_2)
    p = tl.fma(p, f, LOG_1)
    p = tl.fma(p, f, LOG_0)
    high = e * LN2_HIGH
    total = high + f
    low = tl.fma(e, LN2_LOW, f - (total - high))
    result = total + tl.fma(p, square, low)
    result = tl.where(x == 0.0, -INFINITY, result)
    result = tl.where(x >= 0.0, result, float("nan"))
    return tl.where(x == INFINITY, x, result)


@triton.jit
def rsqrt(x):
    """1 / sqrt(x), one compensated step after IEEE square root and division: `reference.primitives.rsqrt`."""
    y = div_rn(1.0, sqrt_rn(x))
    high = x * y
    low = tl.fma(x, y, -high)
    error = tl.fma(-low, y, tl.fma(-high, y, 1.0))
    stepped = tl.fma(0.5 * y, error, y)
    return tl.where((tl.abs(x) < INFINITY) & (x != 0.0), stepped, y)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x): `reference.primitives.sigmoid`."""
    return div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def silu(x):
    """x / (1 + e^-x): `reference.primitives.silu`."""
    return div_rn(x, 1.0 + exp(-x))


@triton.jit
def ordered(x):
    """int32 that orders like float32 ``x``, NaN above everything: its maximum is exact, whatever the order."""
    u = bits(x)
    return tl.where(x == x, u ^ ((u >> 31) & 0x7FFFFFFF), 0x7FC00000)


@triton.jit
def unordered(key):
    """The float32 that ``ordered`` made ``key`` from."""
    return from_bits(key ^ ((key >> 31) & 0x7FFFFFFF))


@triton.jit
def pairs_tree(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums of the rows of float32 [ROWS, WIDTH], WIDTH a power of two up to 2^15, by adjacent pairs: [ROWS].

    Each level is one commutative addition of two elements, so no layout of the data can change a bit.
    """
    for level in tl.static_range(15):
        if (WIDTH >> level) > 1:
            pairs = tl.reshape(x, [ROWS, WIDTH >> (level + 1), 2])
            if _INTERPRETED:  # its sum starts from +0, and loses the sign of -0 + -0
                left, right = tl.split(pairs)
                x = left + right
            else:
                x = tl.sum(pairs, axis=2)
    return tl.reshape(x, [ROWS])
