"""Reductions: every order against a plain loop that spells it out, NumPy's and PyTorch's own sums, tree identities."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.arithmetic import fma
from reference.reductions import (
    REDUCTIONS,
    binary_counter,
    blocked,
    chain,
    halving_tree,
    lanes_tree,
    merge_tree,
    pairs_tree,
    pairwise,
    segments_tree,
    split_k,
    strided_vector,
    warp_shuffle,
)
from tests.reference.bits import Float32Array, assert_same_bits, f32, random_patterns

LENGTHS = [1, 2, 3, 7, 8, 31, 64, 100, 257, 1000]
ZERO = np.float32(0)


def rows(n: int, seed: int = 0) -> Float32Array:
    """Values over a wide range of exponents, so that nearly every change of order changes bits."""
    rng = np.random.default_rng([n, seed])
    return f32(rng.standard_normal((4, n)) * 2.0 ** rng.integers(-6, 6, (4, n)))


# ---- the orders, spelled out on a list of float32 scalars ----


def tree(parts: Sequence[np.float32]) -> np.float32:
    """Adjacent pairs; an odd last one passes through."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def halves(parts: Sequence[np.float32]) -> np.float32:
    """Element i with element i + n/2."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [parts[i] + parts[i + half] for i in range(half)]
    return parts[0]


def take(total: np.float32, x: np.float32, step: str) -> np.float32:
    return total + x if step == "add" else np.float32(fma(f32(x), f32(x), f32(total)))


def loop(x: Sequence[np.float32], step: str) -> np.float32:
    total = ZERO
    for value in x:
        total = take(total, value, step)
    return total


def filled(x: Sequence[np.float32], width: int) -> list[np.float32]:
    return [*x, *[ZERO] * (-len(x) % width)]


def lanes_spec(x: Sequence[np.float32], step: str, lanes: int) -> np.float32:
    while lanes > len(x):
        lanes //= 2
    return tree([loop(filled(x, lanes)[lane::lanes], step) for lane in range(lanes)])


def segments_spec(x: Sequence[np.float32], step: str, segments: int) -> np.float32:
    size = len(x) // segments
    return tree([loop(x[s * size : (s + 1) * size], step) for s in range(segments)])


def blocked_spec(x: Sequence[np.float32], step: str, block: int) -> np.float32:
    leaves = filled([value if step == "add" else value * value for value in x], block)
    return loop([tree(leaves[i : i + block]) for i in range(0, len(leaves), block)], "add")


def warp_spec(x: Sequence[np.float32], step: str, warp: int, warps: int, vector: int) -> np.float32:
    threads = warp * warps
    sums = []
    for thread in range(threads):
        own: list[np.float32] = []
        for first in range(thread * vector, len(x), threads * vector):
            own += x[first : first + vector]
        sums.append(loop(own, step))
    return halves(filled([halves(sums[w * warp : (w + 1) * warp]) for w in range(warps)], warp))


def strided_spec(x: Sequence[np.float32], step: str, width: int, registers: int, merge: str) -> np.float32:
    stride = width * registers
    full = len(x) - len(x) % stride
    lanes = []
    for lane in range(width):
        register = [loop(x[r * width + lane : full : stride], step) for r in range(registers)]
        total = register[0]
        for other in register[1:]:
            total = total + other
        lanes.append(total)
    total = {"chain": lambda parts: loop(parts, "add"), "halving": halves, "pairs": tree}[merge](lanes)
    for value in x[full:]:
        total = take(total, value, step)
    return total


def split_spec(x: Sequence[np.float32], step: str, splits: int, merge: str) -> np.float32:
    size = -(-len(x) // splits)
    parts = [loop(x[s * size : (s + 1) * size], step) for s in range(splits)]
    return tree(parts) if merge == "pairs" else loop(parts, "add")


def pairwise_spec(x: Sequence[np.float32], step: str) -> np.float32:
    leaves = [value if step == "add" else value * value for value in x]

    def run(part: list[np.float32]) -> np.float32:
        if len(part) > 128:
            left = len(part) // 2 // 8 * 8
            return run(part[:left]) + run(part[left:])
        full = len(part) // 8 * 8
        total = np.float32(-0.0)
        if full:
            r = [part[lane] for lane in range(8)]
            for i in range(8, full):
                r[i % 8] = r[i % 8] + part[i]
            total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))
        for value in part[full:]:
            total = total + value
        return total

    return run(leaves) + ZERO


Reduction = Callable[..., Float32Array]
SPECIFICATIONS: list[tuple[Reduction, Callable[..., np.float32], dict[str, Any]]] = [
    (chain, loop, {}),
    (lanes_tree, lanes_spec, {"lanes": 256}),
    (lanes_tree, lanes_spec, {"lanes": 8}),
    (segments_tree, segments_spec, {"segments": 8}),
    (segments_tree, segments_spec, {"segments": 3}),
    (blocked, blocked_spec, {"block": 64}),
    (blocked, blocked_spec, {"block": 4}),
    (warp_shuffle, warp_spec, {"warp": 32, "warps": 8, "vector": 1}),
    (warp_shuffle, warp_spec, {"warp": 64, "warps": 4, "vector": 4}),
    (strided_vector, strided_spec, {"width": 16, "registers": 1, "merge": "halving"}),
    (strided_vector, strided_spec, {"width": 8, "registers": 4, "merge": "chain"}),
    (strided_vector, strided_spec, {"width": 6, "registers": 2, "merge": "pairs"}),
    (split_k, split_spec, {"splits": 4, "merge": "chain"}),
    (split_k, split_spec, {"splits": 7, "merge": "pairs"}),
    (pairwise, pairwise_spec, {}),
]


@pytest.mark.parametrize("step", ["add", "square"])
@pytest.mark.parametrize(
    ("reduction", "specification", "parameters"),
    SPECIFICATIONS,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_equals_the_order_spelled_out(
    reduction: Reduction, specification: Callable[..., np.float32], parameters: dict[str, Any], step: str
) -> None:
    for n in LENGTHS:
        if n % parameters.get("segments", 1):
            continue
        x = rows(n)
        expected = f32([specification(list(row), step, **parameters) for row in x])
        assert_same_bits(reduction(x, step=step, **parameters), expected)
        batched = reduction(np.stack([x, x[::-1]]), step=step, **parameters)
        assert_same_bits(batched, np.stack([expected, expected[::-1]]))


@pytest.mark.parametrize("n", [*range(1, 40), 127, 128, 129, 136, 255, 1000, 1023, 4096, 10_007, 151_936])
def test_pairwise_equals_numpy(n: int) -> None:
    x = rows(n, seed=1)
    assert_same_bits(pairwise(x), np.sum(x, axis=-1))
    assert_same_bits(pairwise(x[0]), np.asarray(np.sum(x[0])))


def test_pairwise_and_numpy_agree_on_zeros_and_specials() -> None:
    for n in (1, 5, 8, 200):
        x = np.full((1, n), -0.0, np.float32)
        assert_same_bits(pairwise(x), np.sum(x, axis=-1))
    x = random_patterns(40_000).reshape(200, 200)
    with np.errstate(all="ignore"):
        assert_same_bits(pairwise(x), np.sum(x, axis=-1))


def test_named_reductions_differ_from_one_another() -> None:
    """Each order is there because it gives other bits than the rest."""
    x = rows(4096)
    results = {name: REDUCTIONS[name](x) for name in REDUCTIONS}
    for name, result in results.items():
        for other, reference in results.items():
            assert name == other or (result != reference).any(), (name, other)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_eight_segments_close_under_tensor_parallelism(ranks: int) -> None:
    """Each rank sums its part into one value; the balanced tree over ranks gives the bits of one rank."""
    x = rows(4096, seed=2)
    partials = [segments_tree(part, segments=8 // ranks) for part in np.split(x, ranks, axis=-1)]
    assert_same_bits(merge_tree(partials), segments_tree(x, segments=8))
    assert_same_bits(binary_counter(partials), segments_tree(x, segments=8))


def test_a_tree_over_leaves_that_are_no_power_of_two_does_not_close() -> None:
    x = rows(96 * 16, seed=3)
    whole = segments_tree(x, segments=96)
    halves_ = [segments_tree(part, segments=12) for part in np.split(x, 8, axis=-1)]
    assert (merge_tree(halves_) != whole).any()


@given(power=st.integers(0, 6), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_binary_counter_is_the_balanced_tree(power: int, seed: int) -> None:
    parts = list(rows(1 << power, seed).T)
    assert_same_bits(binary_counter(parts), merge_tree(parts))


@given(n=st.integers(1, 300), lanes=st.sampled_from([1, 2, 8, 64, 256]), extra=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_zero_padding_does_not_change_a_lanes_tree_of_fixed_width(n: int, lanes: int, extra: int) -> None:
    x = rows(n)
    padded = np.pad(x, ((0, 0), (0, extra)))
    if n >= lanes:
        assert_same_bits(lanes_tree(padded, lanes=lanes), lanes_tree(x, lanes=lanes))
    assert_same_bits(blocked(padded, block=lanes), blocked(x, block=lanes))
    assert_same_bits(chain(padded), chain(x))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_rows_are_independent_and_arguments_kept(name: str) -> None:
    x = rows(512, seed=4)
    kept = x.copy()
    whole = REDUCTIONS[name](x)
    assert_same_bits(REDUCTIONS[name](x[2]), np.asarray(whole[2]))
    assert_same_bits(REDUCTIONS[name](x[::-1]), np.ascontiguousarray(whole[::-1]))
    assert_same_bits(REDUCTIONS[name](np.asfortranarray(x)), whole)
    assert np.array_equal(x, kept) and whole.dtype == np.float32


@pytest.mark.parametrize("name", REDUCTIONS)
def test_specials(name: str) -> None:
    x = np.ones((5, 64), np.float32)
    x[1, 3], x[2, 60], x[3, 1:3] = np.nan, np.inf, [np.inf, -np.inf]
    x[4] = 2.0**-149
    with np.errstate(all="ignore"):
        result = REDUCTIONS[name](x)
    assert result[0] == 64 and np.isnan(result[1]) and result[2] == np.inf and np.isnan(result[3])
    assert result[4] == 64 * 2.0**-149
    assert not np.signbit(REDUCTIONS[name](np.full((1, 64), -0.0, np.float32)))[0]


def test_trees_of_adjacent_pairs_and_of_halves_are_two_orders() -> None:
    x = f32([[1, -1, 2.0**-24, 0]])
    assert pairs_tree(x)[0] == 2.0**-24  # (1 - 1) + (2^-24 + 0)
    assert halving_tree(x)[0] == 0  # (1 + 2^-24) + (-1 + 0), the first sum a tie


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: chain(x.astype(np.float64)), r"^x: expected dtype float32, got float64"),
        (lambda x: REDUCTIONS["chain"](x, step="cube"), r"^step: 'cube' is unknown; choose one of add, square"),
        (lambda x: chain(x[:, :0]), r"^x: expected a last axis with at least one element, got shape \(4, 0\)"),
        (lambda x: lanes_tree(x, lanes=12), r"^lanes: expected a power of two, got 12"),
        (lambda x: segments_tree(x, segments=7), r"^segments: 7 does not divide the 64 elements of the last axis"),
        (lambda x: blocked(x, block=0), r"^block: expected a power of two, got 0"),
        (lambda x: warp_shuffle(x, warps=33), r"^warps: 33 exceeds the 32 lanes that merge them"),
        (lambda x: warp_shuffle(x, vector=0), r"^vector: expected at least 1, got 0"),
        (lambda x: strided_vector(x, merge="sum"), r"^merge: 'sum' is unknown; choose one of chain, halving, pairs"),
        (lambda x: split_k(x, splits=0), r"^splits: expected at least 1, got 0"),
        (lambda x: halving_tree(x[:, :3]), r"^x: the last axis must be a power of two, got 3"),
        (lambda x: binary_counter([x, x, x]), r"^parts: their number must be a power of two, got 3"),
        (lambda x: merge_tree([x, x[:1]]), r"^parts: expected arrays of one shape"),
        (lambda x: merge_tree([]), r"^parts: expected arrays of one shape"),
    ],
)
def test_bad_arguments_name_themselves(call: Callable[[Float32Array], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(rows(64))
