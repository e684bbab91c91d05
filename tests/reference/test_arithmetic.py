"""Arithmetic: FMA against the machine's fmaf and exact fractions; flushing, signed zeros, NaN."""

import ctypes
import ctypes.util
from fractions import Fraction
from math import isfinite

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import arithmetic
from reference.arithmetic import fma, fma_round_to_odd, fused_multiply_add
from reference.formats import FLOAT32
from reference.rounding import round_scalar
from tests.reference.bits import Float32Array, assert_same_bits, f32, random_patterns, stratified
from tests.reference.exhaustive import oracle

needs_compiler = pytest.mark.skipif(oracle.compiler() is None, reason="needs a C compiler")
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def constructed(count: int, seed: int) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Operands whose sum lies next to a float32 rounding boundary: where one rounding too many shows."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(-60, 60, count)
    c = np.ldexp(rng.integers(1 << 23, 1 << 24, count), exponent).astype(np.float32)
    # a * b is half a unit in the last place of c, plus or minus something far below
    a = np.ldexp(rng.integers(1 << 11, 1 << 12, count) * 2 + 1, exponent - 40).astype(np.float32)
    b = (np.ldexp(1.0, exponent - 1) / a.astype(np.float64)).astype(np.float32)
    sign = rng.choice(f32([-1, 1]), count)
    return a, b * sign, c * rng.choice(f32([-1, 1]), count)


@needs_compiler
@pytest.mark.parametrize("kind", ["patterns", "near", "constructed", "subnormal", "cancelling"])
def test_fma_equals_hardware(kind: str) -> None:
    count = 400_000
    rng = np.random.default_rng(3)
    a, b, c = (random_patterns(count, seed) for seed in (1, 2, 3))
    if kind == "near":
        a, b, c = (rng.standard_normal(count).astype(np.float32) for _ in range(3))
    elif kind == "constructed":
        a, b, c = constructed(count, 4)
    elif kind == "subnormal":
        a = np.ldexp(rng.standard_normal(count), rng.integers(-90, -60, count)).astype(np.float32)
        b = np.ldexp(rng.standard_normal(count), rng.integers(-90, -60, count)).astype(np.float32)
        c = rng.integers(0, 1 << 24, count, dtype=np.uint32).view(np.float32)
    elif kind == "cancelling":
        a, b = (rng.standard_normal(count).astype(np.float32) for _ in range(2))
        c = -(a * b)
    expected = oracle.fma(a, b, c)
    with np.errstate(all="ignore"):
        assert_same_bits(fused_multiply_add(a, b, c), expected)
    assert_same_bits(fma_round_to_odd(a, b, c), expected)


def test_fma_equals_the_c_library() -> None:
    """Without a compiler too: one call of libm's fmaf per element."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6").fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    parts = [constructed(2000, 5), tuple(random_patterns(2000, seed) for seed in (7, 8, 9))]
    a, b, c = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    expected = np.array([fmaf(*map(float, row)) for row in zip(a, b, c, strict=True)], np.float32)
    assert_same_bits(fma(a, b, c), expected)


@given(FLOATS, FLOATS, FLOATS)
@settings(max_examples=500, deadline=None)
def test_fma_equals_exact_fractions(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        expected = round_scalar(exact, FLOAT32)
        assert float(fma(f32(a), f32(b), f32(c))) == expected


def test_plain_float64_is_not_fma_on_constructed_cases() -> None:
    a, b, c = constructed(100_000, 6)
    plain = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (plain != fma(a, b, c)).any()


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("add", lambda x, y: x + y),
        ("sub", lambda x, y: x - y),
        ("mul", lambda x, y: x * y),
        ("div", lambda x, y: x / y),
    ],
)
def test_two_operand_arithmetic_equals_exact_fractions(name: str, operation: object) -> None:
    rng = np.random.default_rng(8)
    pool = stratified(2)[~np.isnan(stratified(2))]
    a, b = rng.choice(pool, 3000), rng.choice(pool, 3000)
    ours = getattr(arithmetic, name)(a, b)
    for x, y, result in zip(a, b, ours, strict=True):
        if isfinite(x) and isfinite(y) and not (name == "div" and y == 0):
            exact = operation(Fraction(float(x)), Fraction(float(y)))  # type: ignore[operator]
            if exact:
                assert float(result) == round_scalar(exact, FLOAT32), (x, y)


def test_sqrt_is_correctly_rounded() -> None:
    x = np.abs(stratified(64))
    x = x[np.isfinite(x)]
    root = arithmetic.sqrt(x).astype(np.float64)
    # |root - exact| <= half a unit: the squares of the neighbouring midpoints enclose x, exactly in float64 (50 bits)
    spacing = np.spacing(root.astype(np.float32)).astype(np.float64)
    normal = x > 0
    assert ((root - spacing / 2)[normal] ** 2 <= x[normal]).all()
    assert ((root + spacing / 2)[normal] ** 2 >= x[normal]).all()
    assert np.signbit(arithmetic.sqrt(f32([-0.0])))[0] and np.isnan(arithmetic.sqrt(f32([-1])))[0]


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_extrema_order_zeros_and_propagate_nan(name: str) -> None:
    extremum = getattr(arithmetic, name)
    positive, negative = f32(0.0), f32(-0.0)
    for a, b in ((positive, negative), (negative, positive)):
        assert np.signbit(extremum(a, b)) == (name == "minimum")
    assert np.signbit(extremum(negative, negative)) and not np.signbit(extremum(positive, positive))
    for left, right in ((np.nan, 1), (1, np.nan), (np.nan, np.inf)):
        assert np.isnan(extremum(f32(left), f32(right)))
    x, y = random_patterns(10_000, 1), random_patterns(10_000, 2)
    keep = ~(np.isnan(x) | np.isnan(y))
    expected = np.where((x > y) == (name == "maximum"), x, y)
    assert_same_bits(extremum(x, y)[keep], expected[keep])


def test_comparisons() -> None:
    a, b = f32([1, 0.0, np.nan, -np.inf]), f32([2, -0.0, np.nan, np.inf])
    assert arithmetic.less(a, b).tolist() == [True, False, False, True]
    assert arithmetic.less_equal(a, b).tolist() == [True, True, False, True]
    assert arithmetic.equal(a, b).tolist() == [False, True, False, False]
    tiny = f32([1e-40])
    assert arithmetic.equal(tiny, -tiny).tolist() == [False]
    assert arithmetic.equal(tiny, -tiny, flush="inputs").tolist() == [True]


def test_flush_policies() -> None:
    tiny, one = f32(-1e-40), f32(1)
    half = f32(2.0**-126)
    cases = {
        "keep": (tiny, half / 2),
        "inputs": (f32(-0.0), half / 2),
        "outputs": (f32(-0.0), 0),
        "both": (0, 0),
    }
    for flush, (scaled, halved) in cases.items():
        result = arithmetic.mul(tiny, one, flush)  # type: ignore[arg-type]
        assert result == scaled and np.signbit(result)
        assert arithmetic.mul(half, f32(0.5), flush) == halved  # type: ignore[arg-type]
    # tininess is decided after rounding: this product rounds up to the smallest normal value
    assert arithmetic.mul(f32(2.0**-63 * (1 - 2.0**-24)), f32(2.0**-63), "outputs") == half
    # a product of flushed inputs cancels nothing
    assert arithmetic.fma(tiny, one, f32(3), "both") == 3


def test_signed_zeros_and_infinities() -> None:
    zero, one, infinity = f32(0.0), f32(1), f32(np.inf)
    assert np.signbit(fma(-zero, one, -zero)) and not np.signbit(fma(-zero, one, zero))
    assert not np.signbit(fma(one, one, -one)) and not np.signbit(arithmetic.sub(one, one))
    assert np.isnan(fma(infinity, zero, one)) and np.isnan(fma(infinity, one, -infinity))
    assert fma(f32(3e38), f32(3e38), -infinity) == -infinity
    assert fma(f32(3e38), f32(2), f32(-3e38)) == f32(3e38)
    assert arithmetic.div(one, -zero) == -infinity and np.isnan(arithmetic.div(zero, zero))
    assert fma(f32(2.0**-149), f32(0.5), zero) == 0  # a tie, to even
    assert fma(f32(2.0**-149), f32(0.5), f32(2.0**-149)) == f32(2.0**-148)


def test_bad_arguments_name_themselves() -> None:
    x = f32([1])
    with pytest.raises(TypeError, match=r"^b: expected dtype float32, got float64"):
        arithmetic.add(x, np.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^c: byte order of >f4 is not native"):
        fma(x, x, x.astype(">f4"))
    with pytest.raises(TypeError, match=r"^a: expected a NumPy array of float32, got float"):
        arithmetic.mul(1.0, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^flush: 'ftz' is unknown; choose one of keep, inputs, outputs, both"):
        arithmetic.mul(x, x, "ftz")  # type: ignore[arg-type]
