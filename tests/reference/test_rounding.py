"""Rounding: vectorised against the scalar specification, ml_dtypes, and the C oracle where there is a compiler."""

from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.formats import BFLOAT16, FLOAT8_E4M3FN, FLOAT16, FLOAT32, FORMATS, TFLOAT32, Format, decode
from reference.rounding import Mode, Overflow, round_scalar, round_to
from tests.reference.bits import assert_same_bits, f32, random_patterns, stratified
from tests.reference.exhaustive import oracle
from tests.reference.exhaustive.subjects import PEERS, SUBJECTS

CASES = [
    (fmt, mode, overflow)
    for fmt in FORMATS.values()
    for mode in get_args(Mode)
    for overflow in get_args(Overflow)
    if fmt.has_infinity or overflow != "infinity"
]


def boundaries(fmt: Format) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Around values of `fmt`: the value, the halfway point to the next one, and float64 neighbours of both."""
    codes = np.unique(np.linspace(0, fmt.max_code, 40).astype(np.uint32))
    codes = np.concatenate(
        [codes, np.array([1, 2, fmt.max_code - 1], np.uint32), np.array([1, 2, 3], np.uint32) << fmt.mantissa_bits]
    )
    value = decode(codes.astype(fmt.storage), fmt).astype(np.float64)
    following = decode(np.minimum(codes + 1, fmt.max_code).astype(fmt.storage), fmt).astype(np.float64)
    beyond = fmt.max_finite * np.array([1 + 2.0 ** -(fmt.mantissa_bits + 2), 1.5, 2, 1e300 / fmt.max_finite])
    points = np.concatenate([value, (value + following) / 2, beyond, [fmt.min_subnormal / 2, 5e-324, 1e-310]])
    points = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, np.inf), [np.inf, np.nan, 0.0]])
    return np.concatenate([points, -points])


@pytest.mark.parametrize(("fmt", "mode", "overflow"), CASES, ids=str)
def test_equals_scalar_specification(fmt: Format, mode: Mode, overflow: Overflow) -> None:
    x = boundaries(fmt)
    random = np.random.default_rng(1).integers(0, 1 << 32, x.size, dtype=np.uint64).astype(np.uint32)
    bits = random if mode == "stochastic" else None
    expected = [
        round_scalar(float(v), fmt, mode, overflow, int(r) if mode == "stochastic" else None)
        for v, r in zip(x, random, strict=True)
    ]
    result = round_to(x, fmt, mode, overflow, bits)
    assert_same_bits(result, np.array(expected).astype(np.float32), x)
    # the sign of NaN and of zero is part of the specification
    assert np.array_equal(np.signbit(result), np.signbit(expected))


@given(
    x=st.floats(width=64),
    fmt=st.sampled_from(list(FORMATS.values())),
    mode=st.sampled_from(["rne", "rtz", "rna", "odd"]),
)
@settings(max_examples=400, deadline=None)
def test_equals_scalar_specification_on_any_float64(x: float, fmt: Format, mode: Mode) -> None:
    ours = round_to(np.array([x]), fmt, mode, "saturate")
    assert_same_bits(ours, np.array([round_scalar(x, fmt, mode, "saturate")]).astype(np.float32))


@pytest.mark.parametrize("name", PEERS)
def test_equals_ml_dtypes(name: str) -> None:
    dtype, overflow = PEERS[name]
    x = np.concatenate([stratified(512), random_patterns(1 << 18)])
    with np.errstate(all="ignore"):
        theirs = x.astype(dtype).astype(np.float32)
    assert_same_bits(round_to(x, FORMATS[name], "rne", overflow), theirs, x)


@pytest.mark.parametrize("source", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("target", FORMATS.values(), ids=str)
def test_every_16_bit_value_into_every_format(source: Format, target: Format) -> None:
    """All 2^16 inputs: the vectorised code against ml_dtypes, or the scalar specification where it has no such type."""
    x = decode(np.arange(1 << 16).astype(np.uint16), source)
    overflow: Overflow = "infinity" if target.has_infinity else "nan"
    ours = round_to(x, target, "rne", overflow)
    if target.name in PEERS:
        with np.errstate(all="ignore"):
            theirs = x.astype(PEERS[target.name][0]).astype(np.float32)
    else:
        theirs = np.array([round_scalar(float(v), target, "rne", overflow) for v in x], np.float32)
    assert_same_bits(ours, theirs, x)


@pytest.mark.skipif(oracle.compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("subject", [name for name in SUBJECTS if name.startswith("cast/")])
def test_stratified_sample_of_the_exhaustive_check(subject: str) -> None:
    outcome = SUBJECTS[subject](stratified(64))
    assert outcome.mismatches == 0, outcome.examples


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_rounding_is_idempotent_and_monotone(fmt: Format) -> None:
    x = np.sort(stratified(32)[~np.isnan(stratified(32))])
    for mode in ("rne", "rtz", "rna", "odd"):
        once = round_to(x, fmt, mode, "saturate")
        assert_same_bits(round_to(once, fmt, mode, "saturate"), once)
        assert (np.diff(once) >= 0).all()


def test_float64_is_rounded_once() -> None:
    # halfway between two float16 values plus 2^-50: float32 would drop the excess, then tie to even
    x = np.array([1 + 2.0**-11 + 2.0**-50])
    assert round_to(x, FLOAT16)[0] == 1 + 2.0**-10
    assert round_to(x.astype(np.float32), FLOAT16)[0] == 1


def test_round_to_odd_survives_a_second_rounding() -> None:
    # p + 2 bits of odd rounding make the second rounding exact: TF32 (11 bits) then bfloat16 (8 bits)
    x = stratified(256)
    assert_same_bits(round_to(round_to(x, TFLOAT32, "odd"), BFLOAT16), round_to(x, BFLOAT16), x)


def test_stochastic_rounding_is_unbiased_over_all_random_bits() -> None:
    # the discarded fraction of 1 + 3 * 2^-10 in bfloat16 is 3/8: exactly 3/8 of the random values round up
    bits = (np.arange(1 << 12, dtype=np.uint64) << 20).astype(np.uint32)
    x = np.full(bits.shape, 1 + 3 * 2.0**-10, np.float32)
    rounded = round_to(x, BFLOAT16, "stochastic", random_bits=bits)
    assert set(rounded.tolist()) == {1.0, 1 + 2.0**-7}
    assert (rounded > 1).mean() == 3 / 8


def test_scalar_takes_exact_fractions() -> None:
    assert round_scalar(Fraction(1, 3), FLOAT32) == float(f32(1 / 3))
    assert round_scalar(Fraction(2) ** -150 + Fraction(2) ** -400, FLOAT32) == 2.0**-149


def test_bad_arguments_name_themselves() -> None:
    x = f32([1.0, 2.0])
    with pytest.raises(ValueError, match=r"^overflow: float8_e4m3fn has no infinity; choose 'saturate' or 'nan'"):
        round_to(x, FLOAT8_E4M3FN)
    with pytest.raises(ValueError, match=r"^mode: 'nearest' is unknown; choose one of rne"):
        round_to(x, BFLOAT16, "nearest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^overflow: 'clamp' is unknown"):
        round_to(x, BFLOAT16, "rne", "clamp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^random_bits: mode 'stochastic' needs random bits"):
        round_to(x, BFLOAT16, "stochastic")
    with pytest.raises(ValueError, match=r"^random_bits: mode 'rne' takes no random bits"):
        round_to(x, BFLOAT16, random_bits=np.array([1, 2], np.uint32))
    with pytest.raises(ValueError, match=r"^random_bits: shape \(3,\) differs from the shape \(2,\) of x"):
        round_to(x, BFLOAT16, "stochastic", random_bits=np.array([1, 2, 3], np.uint32))
    with pytest.raises(TypeError, match=r"^x: expected dtype float32 or float64, got float16"):
        round_to(x.astype(np.float16), BFLOAT16)
    with pytest.raises(TypeError, match=r"^random_bits: expected dtype uint32, got int64"):
        round_to(x, BFLOAT16, "stochastic", random_bits=np.array([1, 2], np.int64))
