"""Primitives: against their sequence in C, against mpmath, at special values, and over every 16-bit and 8-bit input."""

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest

from reference.formats import BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E4M3FNUZ, FLOAT8_E5M2, FLOAT16, FLOAT32, Format, decode
from reference.primitives import PRIMITIVES, exp, exp2, exp2_nonpositive, log, rsqrt, sigmoid, silu
from reference.primitives.correctly_rounded import round_mpmath
from reference.rounding import round_to
from tests.reference.bits import Float32Array, assert_same_bits, f32, random_patterns, stratified
from tests.reference.exhaustive import oracle
from tests.reference.exhaustive.domains import domain
from tests.reference.exhaustive.subjects import SUBJECTS

EXACT: dict[str, Callable[[Any], Any]] = {
    "exp": mpmath.exp,
    "exp2": lambda x: mpmath.mpf(2) ** x,
    "exp2_nonpositive": lambda x: mpmath.mpf(2) ** x,
    "log": mpmath.log,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
}
#: Largest error of the sequences over all float32 inputs of their domain, in units in the last place.
BOUNDS = {
    "exp": 0.8914,
    "exp2": 0.8785,
    "exp2_nonpositive": 0.8002,
    "log": 0.8823,
    "rsqrt": 0.5001,
    "sigmoid": 2.481,
    "silu": 2.394,
}
#: Inputs that the exhaustive run found to be the worst or nearly so.
WORST = {
    "exp": ["-0x1.765026p2"],
    "exp2": ["-0x1.f9fc6ap6", "-0x1.01ff8ap6"],
    "log": ["0x1.4665f2p0"],
    "rsqrt": ["0x1.13e07p1"],
    "sigmoid": ["-0x1.0a2bd8p4"],
    "silu": ["-0x1.0af4e2p4"],
}


def inputs(function: str, count: int = 400) -> Float32Array:
    """Finite inputs inside the domain where the exact result is a finite number; the worst known ones first."""
    low, high = {
        "exp": (-87.3, 88.7),
        "exp2": (-149.0, 127.9),
        "exp2_nonpositive": (-126.0, 0.0),
        "sigmoid": (-87.0, 80.0),
        "silu": (-87.0, 80.0),
    }.get(function, (2.0**-149, 3e38))
    rng = np.random.default_rng(11)
    x = f32(rng.uniform(low, high, count) if low < 0 else np.exp(rng.uniform(np.log(low), np.log(high), count)))
    small = f32(rng.standard_normal(count // 4) * 2.0 ** rng.integers(-30, 0, count // 4))
    near_one = f32(1 + rng.standard_normal(count // 4) * 2.0 ** -rng.integers(1, 22, count // 4))
    worst = f32([float.fromhex(text) for text in WORST.get(function, [])])
    x = np.concatenate([worst, x, small, near_one])
    return x[(x >= low) & (x <= high)]


def ulp_error(function: str, x: np.float32, y: np.float32) -> float:
    """Error of y in units in the last place of the exact value."""
    with mpmath.workprec(200):
        exact = EXACT[function](mpmath.mpf(float(x)))
        if exact == 0:
            return abs(float(y)) * 2.0**149
        exponent = max(int(mpmath.floor(mpmath.log(abs(exact), 2))), -126)
        return float(abs(exact - mpmath.mpf(float(y))) / mpmath.mpf(2) ** (exponent - 23))


@pytest.mark.parametrize("function", PRIMITIVES)
def test_error_bound_against_mpmath(function: str) -> None:
    x = inputs(function)
    y = PRIMITIVES[function]["rlk"](x)
    worst = max(ulp_error(function, a, b) for a, b in zip(x, y, strict=True))
    assert worst <= BOUNDS[function]
    assert worst > (BOUNDS[function] - 1e-3 if function in WORST else 0.4)  # and the bound is no higher than needed


@pytest.mark.parametrize("function", PRIMITIVES)
def test_correctly_rounded_variant_equals_mpmath(function: str) -> None:
    x = inputs(function)
    y = PRIMITIVES[function]["correctly-rounded"](x)
    assert_same_bits(y, f32([round_mpmath(EXACT[function], float(v)) for v in x]), x)


def test_correctly_rounded_ties_are_decided_beyond_float64() -> None:
    # silu(x) = x/2 + x^2/4 - ...: half of an odd subnormal is a tie, which the next term decides
    odd = f32([3 * 2.0**-149, -3 * 2.0**-149, 5 * 2.0**-149])
    assert PRIMITIVES["silu"]["correctly-rounded"](odd).tolist() == [2 * 2.0**-149, -(2.0**-149), 3 * 2.0**-149]
    # 2^-150 is an exact tie between 0 and the smallest subnormal
    assert PRIMITIVES["exp2"]["correctly-rounded"](f32([-150.0]))[0] == 0
    assert PRIMITIVES["exp2"]["correctly-rounded"](f32([np.nextafter(f32(-150), f32(0))]))[0] == 2.0**-149


@pytest.mark.skipif(oracle.compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("subject", [name for name in SUBJECTS if not name.startswith("cast/")])
def test_stratified_sample_of_the_exhaustive_check(subject: str) -> None:
    function, variant = subject.split("/")
    x = np.concatenate([stratified(256), random_patterns(1 << 16), inputs(function)])
    outcome = SUBJECTS[subject](x)
    assert outcome.mismatches == 0, outcome.examples
    assert outcome.worst_ulp is not None
    bound = {"rlk": BOUNDS[function], "correctly-rounded": 0.5, "uncompensated": 1.5}[variant]
    assert outcome.worst_ulp <= bound, outcome.worst_x


@pytest.mark.skipif(oracle.compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16, FLOAT8_E4M3FN, FLOAT8_E4M3FNUZ, FLOAT8_E5M2], ids=str)
@pytest.mark.parametrize("function", PRIMITIVES)
def test_every_narrow_input(function: str, fmt: Format) -> None:
    """All inputs of the format: bits of the C sequence, inside the error bound, and rounded to the format as in C."""
    x = decode(np.arange(1 << fmt.bits).astype(fmt.storage), fmt)
    x = x[~(x > 0)] if function == "exp2_nonpositive" else x
    y = PRIMITIVES[function]["rlk"](x)
    assert_same_bits(y, oracle.primitive(f"{function}/rlk", x), x)
    accuracy = oracle.measure(f"{function}/rlk", x, y, domain(f"{function}/rlk"))
    assert accuracy.worst <= BOUNDS[function]
    codes = oracle.round_codes(y, fmt, "rne", "saturate", None)
    assert_same_bits(round_to(y, fmt, "rne", "saturate"), decode(codes, fmt), x)


INF, NAN = float("inf"), float("nan")
SPECIAL = [
    (exp, [0.0, -0.0, INF, -INF, NAN, 88.8, -104.0, 1e-45], [1.0, 1.0, INF, 0.0, NAN, INF, 0.0, 1.0]),
    (exp2, [0.0, INF, -INF, NAN, 128.0, -149.0, -150.0, -151.0], [1.0, INF, 0.0, NAN, INF, 2.0**-149, 0.0, 0.0]),
    (exp2_nonpositive, [0.0, -0.0, -INF, NAN, -1.0, -126.0, -127.0, -1e38], [1, 1, 0, NAN, 0.5, 2.0**-126, 0, 0]),
    (log, [0.0, -0.0, 1.0, INF, -1.0, -INF, NAN, 2.0**-149], [-INF, -INF, 0.0, INF, NAN, NAN, NAN, -103.27893]),
    (rsqrt, [0.0, -0.0, INF, -1.0, NAN, 4.0, 2.0**-148, -INF], [INF, -INF, 0.0, NAN, NAN, 0.5, 2.0**74, NAN]),
    (sigmoid, [0.0, INF, -INF, NAN, 100.0, -89.0, 1e-45, 3e38], [0.5, 1.0, 0.0, NAN, 1.0, 0.0, 0.5, 1.0]),
    (silu, [0.0, -0.0, INF, -INF, NAN, 100.0, -89.0, 2.0**-148], [0.0, -0.0, INF, NAN, NAN, 100.0, -0.0, 2.0**-149]),
]


@pytest.mark.parametrize(("primitive", "x", "y"), SPECIAL, ids=lambda value: getattr(value, "__name__", ""))
def test_special_values(primitive: Callable[[Float32Array], Float32Array], x: list[float], y: list[float]) -> None:
    assert_same_bits(primitive(f32(x)), f32(y), f32(x))


@pytest.mark.parametrize("function", PRIMITIVES)
def test_bits_depend_on_the_element_alone(function: str) -> None:
    """Shape, stride, neighbours and blocks change nothing."""
    x = -np.abs(stratified(64)[:40_000])
    for primitive in PRIMITIVES[function].values():
        flat = primitive(x)
        assert_same_bits(primitive(x.reshape(4, 100, 100)), flat.reshape(4, 100, 100))
        assert_same_bits(primitive(x[::-7]), np.ascontiguousarray(flat[::-7]))
        assert_same_bits(primitive(x[:1]), flat[:1])
        assert primitive(x[3]).shape == () and primitive(x[:0]).shape == (0,)


def test_arguments_are_not_modified() -> None:
    x = stratified(4)
    for variants in PRIMITIVES.values():
        for primitive in variants.values():
            y = -np.abs(x)
            kept = y.copy()
            primitive(y)
            assert np.array_equal(y.view(np.uint32), kept.view(np.uint32))


def test_bad_arguments_name_themselves() -> None:
    with pytest.raises(TypeError, match=r"^x: expected dtype float32, got float64"):
        exp(np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^x: byte order of >f4 is not native"):
        log(np.zeros(3, ">f4"))
    with pytest.raises(ValueError, match=r"^x: expected values <= 0, got a positive one; use exp2"):
        exp2_nonpositive(f32([-1.0, 2.0]))


def test_exact_results_of_float32_arguments_only() -> None:
    assert round_to(exp(f32([1.0])), FLOAT32)[0] == f32(np.e)
