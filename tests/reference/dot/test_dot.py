"""Matrix units: against their scalar specification, against mmasim, and the properties that every unit has."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.dot import UNITS, aligned, dot
from reference.dot.scalar import dot_scalar
from reference.formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS
from reference.rounding import round_to
from tests.reference.bits import assert_same_bits, f32
from tests.reference.dot.dot_cases import KINDS, borrow_from_accumulator, operands

CASES = [(unit, name) for unit in UNITS for name in UNITS[unit].input_formats]


@pytest.mark.parametrize(("unit", "input_format"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_scalar_specification(unit: str, input_format: str, kind: str) -> None:
    fmt = FORMATS[input_format]
    a, b, c = operands(kind, fmt, (6, 20 if kind == "special" else 35, 5), seed=1)
    ours = dot(a, b, c, unit=unit, input_format=input_format)
    expected = [
        [dot_scalar(a[i].tolist(), b[:, j].tolist(), float(c[i, j]), unit, fmt) for j in range(5)] for i in range(6)
    ]
    assert_same_bits(ours, f32(expected))


@given(data=st.data(), case=st.sampled_from(CASES), kind=st.sampled_from(KINDS), seed=st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_an_element_depends_on_its_row_column_and_start_alone(
    data: st.DataObject, case: tuple[str, str], kind: str, seed: int
) -> None:
    unit, input_format = case
    M, K, N = (data.draw(st.integers(1, high), label=name) for name, high in (("M", 9), ("K", 40), ("N", 9)))
    a, b, c = operands(kind, FORMATS[input_format], (M, K, N), seed)
    whole = dot(a, b, c, unit=unit, input_format=input_format)
    rows, columns = np.random.default_rng(seed).permutation(M), np.random.default_rng(seed + 1).permutation(N)
    permuted = dot(a[rows], b[:, columns], c[np.ix_(rows, columns)], unit=unit, input_format=input_format)
    assert_same_bits(permuted, np.ascontiguousarray(whole[np.ix_(rows, columns)]))
    i, j = data.draw(st.integers(0, M - 1), label="i"), data.draw(st.integers(0, N - 1), label="j")
    alone = dot(a[i : i + 1], b[:, j : j + 1], c[i : i + 1, j : j + 1], unit=unit, input_format=input_format)
    assert_same_bits(alone, whole[i : i + 1, j : j + 1].copy())


@pytest.mark.parametrize(("unit", "input_format"), CASES)
def test_tiles_and_memory_order_do_not_matter(unit: str, input_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = operands("normal", FORMATS[input_format], (70, 65, 90), seed=3)
    whole = dot(a, b, c, unit=unit, input_format=input_format)
    transposed = np.ascontiguousarray(b.T).T
    assert_same_bits(dot(np.asfortranarray(a), transposed, c, unit=unit, input_format=input_format), whole)
    monkeypatch.setattr("reference.dot.tiles.AREA", 96)
    monkeypatch.setattr("reference.dot.tiles.WIDTH", 13)
    assert_same_bits(dot(a, b, c, unit=unit, input_format=input_format), whole)


@pytest.mark.parametrize(("unit", "input_format"), CASES)
@pytest.mark.parametrize("kind", ["normal", "wide", "powers", "cancelling"])
def test_zero_padding_in_k_does_not_change_bits(unit: str, input_format: str, kind: str) -> None:
    a, b, c = operands(kind, FORMATS[input_format], (8, 33, 8), seed=4)
    wide, deep = np.pad(a, ((0, 0), (0, 31))), np.pad(b, ((0, 31), (0, 0)))
    plain = dot(a, b, c, unit=unit, input_format=input_format)
    # adding +0 to an accumulator that underflowed to -0 gives +0: the one thing padding can change
    assert_same_bits(dot(wide, deep, c, unit=unit, input_format=input_format) + f32(0), plain + f32(0))
    assert not (np.signbit(plain) & (plain == 0)).any() or kind == "wide"


@pytest.mark.parametrize(("unit", "input_format"), CASES)
def test_the_accumulator_chains(unit: str, input_format: str) -> None:
    """K in two calls, cut at a multiple of every group, is K in one call."""
    a, b, c = operands("normal", FORMATS[input_format], (9, 96, 7), seed=5)
    first = dot(a[:, :32], b[:32], c, unit=unit, input_format=input_format)
    second = dot(a[:, 32:], b[32:], first, unit=unit, input_format=input_format)
    assert_same_bits(second, dot(a, b, c, unit=unit, input_format=input_format))


@pytest.mark.parametrize("unit", ["mfma-cdna3-g8", "hopper-k16", "ampere-k8"])
@pytest.mark.parametrize("input_format", ["bfloat16", "float16"])
def test_float32_and_float64_alignment_agree(unit: str, input_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = operands("normal", FORMATS[input_format], (40, 64, 40), seed=6)
    fast = dot(a, b, c, unit=unit, input_format=input_format)
    monkeypatch.setattr(aligned, "MODERATE", (1000, -1000))
    assert_same_bits(dot(a, b, c, unit=unit, input_format=input_format), fast)


def test_multiplication_and_addition_equal_fma_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from reference.dot import fma32_seq

    for kind, fmt in (("normal", BFLOAT16), ("wide", FLOAT16), ("sparse", BFLOAT16), ("cancelling", FLOAT16)):
        a, b, c = operands(kind, fmt, (40, 64, 40), seed=7)
        assert fma32_seq.products_are_exact(a, b)
        fast = dot(a, b, c, input_format=fmt.name)
        with monkeypatch.context() as patch:
            patch.setattr(fma32_seq, "products_are_exact", lambda a, b: False)
            assert_same_bits(dot(a, b, c, input_format=fmt.name), fast)


def test_inexact_products_are_recognised() -> None:
    from reference.dot.fma32_seq import products_are_exact

    one = f32([[1.0]])
    assert products_are_exact(one, one) and products_are_exact(f32([[1 + 2.0**-7]]), f32([[1 + 2.0**-15]]))
    assert not products_are_exact(f32([[1 + 2.0**-8]]), f32([[1 + 2.0**-15]]))  # 9 + 16 bits
    assert not products_are_exact(f32([[2.0**-60]]), f32([[(1 + 2.0**-7) * 2.0**-83]]))  # last bit below 2^-149
    assert not products_are_exact(f32([[2.0**64]]), f32([[2.0**63]]))  # overflow
    assert not products_are_exact(one, f32([[np.inf]])) and not products_are_exact(one, f32([[np.nan]]))


def test_units_disagree_with_one_another() -> None:
    """A model that equalled another on ordinary data would be a copy of it."""
    a, b, c = operands("normal", BFLOAT16, (64, 256, 64), seed=8)
    results = [dot(a, b, c, unit=unit, input_format="bfloat16") for unit in UNITS]
    for i, left in enumerate(results):
        for right in results[:i]:
            assert (left != right).mean() > 0.1


def test_empty_shapes_and_missing_start() -> None:
    for unit, input_format in CASES:
        fmt = FORMATS[input_format]
        a, b, c = operands("normal", fmt, (3, 32, 4), seed=9)
        run = partial(dot, unit=unit, input_format=input_format)
        assert_same_bits(run(a, b), run(a, b, np.zeros_like(c)))
        assert run(a[:0], b).shape == (0, 4) and run(a, b[:, :0]).shape == (3, 0)
        assert_same_bits(run(a[:, :0], b[:0], c), c)


def test_arguments_are_not_modified() -> None:
    for unit, input_format in CASES:
        arrays = operands("normal", FORMATS[input_format], (5, 16, 5), seed=10)
        kept = [x.copy() for x in arrays]
        buffer = np.getbufsize()
        dot(*arrays, unit=unit, input_format=input_format)
        assert all(np.array_equal(x, y) for x, y in zip(arrays, kept, strict=True))
        assert np.getbufsize() == buffer


def test_bad_arguments_name_themselves() -> None:
    a, b = np.zeros((2, 3), np.float32), np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match=r"^unit: 'wgmma' is unknown; choose one of fma32-seq"):
        dot(a, b, unit="wgmma")
    with pytest.raises(ValueError, match=r"^input_format of ampere-k8: 'float8_e5m2' is unknown; choose one of"):
        dot(a, b, unit="ampere-k8", input_format="float8_e5m2")
    with pytest.raises(ValueError, match=r"^a, b: expected shapes \[M, K\] and \[K, N\], got \(2, 3\) and \(2, 3\)"):
        dot(a, a)
    with pytest.raises(ValueError, match=r"^c: expected shape \(2, 4\), got \(4,\)"):
        dot(a, b, np.zeros(4, np.float32))
    with pytest.raises(TypeError, match=r"^b: expected dtype float32, got float64"):
        dot(a, np.zeros((3, 4)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^b: 1.001\d* is not a bfloat16 value; round it first"):
        dot(a, np.full((3, 4), 1.001, np.float32), unit="hopper-k16", input_format="bfloat16")
    with pytest.raises(ValueError, match=r"^a: 300.0 is not a float8_e4m3fnuz value"):
        dot(np.full((2, 3), 300, np.float32), b, unit="mfma-cdna3-g8", input_format="float8_e4m3fnuz")


def test_nan_payloads_are_accepted_in_every_format() -> None:
    odd_nan = np.array([[0x7F800001]], np.uint32).view(np.float32)
    for unit, input_format in CASES:
        assert np.isnan(dot(odd_nan, f32([[1.0]]), unit=unit, input_format=input_format)).all()


def test_scalar_specification_refuses_what_it_lacks() -> None:
    with pytest.raises(ValueError, match=r"^a, b: lengths 1 and 2 differ"):
        dot_scalar([1.0], [1.0, 2.0], 0.0, "fma32-seq", FLOAT32)
    with pytest.raises(ValueError, match=r"^unit: 'wgmma' has no scalar specification"):
        dot_scalar([1.0], [1.0], 0.0, "wgmma", BFLOAT16)


def test_known_values() -> None:
    """Small cases worked out by hand."""
    one = round_to(f32([[1.0, 2.0**-12, 2.0**-12, 2.0**-13]]), BFLOAT16)
    run = partial(dot, one, one.T, input_format="bfloat16")
    # 1 + 2^-24 + 2^-24 + 2^-26: an FMA chain loses each tie; Hopper keeps 25 fractional bits, then truncates
    assert run()[0, 0] == 1
    assert run(unit="hopper-k16")[0, 0] == 1 + 2.0**-23
    # CDNA3 keeps 24 fractional bits of each product, sums exactly, rounds to nearest
    assert run(unit="mfma-cdna3-g8")[0, 0] == 1 + 2.0**-23
    # CDNA1 sums in pairs: 1 + 2^-24 is a tie and lost, then 2^-24 + 2^-26 rounds up
    assert run(unit="mfma-cdna1")[0, 0] == 1 + 2.0**-23


def test_cdna3_keeps_32_bits_below_the_accumulator() -> None:
    a, b, c = borrow_from_accumulator(1.0)
    assert dot(a, b, c, unit="mfma-cdna3-g8", input_format="bfloat16")[0, 0] == 2.0**8 - 2.0**-16


def test_cdna3_zero_products_take_no_part_in_the_alignment() -> None:
    # 8 products of 2^-152: aligned to their own exponent they add up to the smallest subnormal; a zero operand's
    # exponent of -126, paired with a large operand, must not push them out
    a, b = f32([[2.0**-76] * 7 + [0.0]]), f32([2.0**-76] * 7 + [2.0**100])[:, None]
    b[0, 0] = 2.0**-75
    assert dot(a, b, unit="mfma-cdna3-g8", input_format="bfloat16")[0, 0] == 2.0**-149
