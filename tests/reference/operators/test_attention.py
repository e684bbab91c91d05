"""Attention against a scalar specification and float64; its bits do not depend on how it is scheduled."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.contract import profile
from reference.operators import (
    AttentionContract,
    DenseKeyValues,
    KvCacheContract,
    PagedKeyValues,
    attention,
    empty_cache,
    write_cache,
)
from reference.primitives import exp2_nonpositive
from tests.reference.exact import (
    add,
    assert_same_bits,
    chain_dot,
    div,
    fma,
    lanes_tree,
    mul,
    one,
    random,
    rnd,
    same_bits,
)

CONTRACT = AttentionContract()
EXACT = CONTRACT.override("rounding.output", "float32")
PROFILES = ("strict-v1/fma32-seq", "strict-v1/mfma-cdna3-g8", "strict-v1/hopper-k16")
T, HEADS, KV_HEADS, D = 150, 4, 2, 16
Q, K, V = random(1, T, HEADS, D, scale=2.0), random(2, T, KV_HEADS, D), random(3, T, KV_HEADS, D)
POSITIONS = np.arange(T)
ANY_PROFILE = st.sampled_from(PROFILES)


def contract_of(name: str, dtype: str = "bfloat16") -> AttentionContract:
    """The profile's contract without its output rounding, which would hide most differences."""
    return profile(name).contract("attention", dtype).override("rounding.output", "float32")  # type: ignore[return-value]


REFERENCE = {name: attention(Q, POSITIONS, DenseKeyValues(K, V), contract_of(name)) for name in PROFILES}


def scalar_attention(
    q: list[float],
    keys: list[list[float]],
    values: list[list[float]],
    position: int,
    window: int | None,
    sink: float | None,
) -> list[float]:
    """One strict query row, one operation at a time (unit fma32-seq)."""
    scale = float(np.float32(math.log2(math.e) / math.sqrt(len(q))))
    largest, total, acc = -math.inf, 0.0, [0.0] * len(q)
    if sink is not None:
        largest, total = mul(sink, float(np.float32(math.log2(math.e)))), 1.0
    first = 0 if window is None else max(0, position - window + 1)
    for start in range(first // 64 * 64, position + 1, 64):
        seen = {j for j in range(start, start + 64) if first <= j <= position}
        scores = {j: mul(chain_dot(q, keys[j]), scale) for j in seen}
        new = max([largest, *scores.values()])
        alpha = 1.0 if largest == new else one(exp2_nonpositive, add(largest, -new)) if largest > -math.inf else 0.0
        p = [one(exp2_nonpositive, add(scores[j], -new)) if j in seen else 0.0 for j in range(start, start + 64)]
        total = fma(total, alpha, lanes_tree(p))
        acc = [mul(a, alpha) for a in acc]
        for i, weight in enumerate(p):
            if start + i in seen:
                acc = [fma(rnd(weight, "bfloat16"), v, a) for v, a in zip(values[start + i], acc, strict=True)]
        largest = new
    return [add(div(a, total), 0.0) for a in acc]


@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (30, False), (None, True), (70, True)])
def test_equals_scalar_specification(window: int | None, with_sinks: bool) -> None:
    positions = np.array([0, 5, 63, 64, 131])
    sinks = random(4, HEADS) if with_sinks else None
    got = attention(Q[:5], positions, DenseKeyValues(K, V), EXACT, window=window, sinks=sinks)
    for t, h in ((0, 0), (1, 3), (2, 1), (3, 2), (4, 0)):
        sink = None if sinks is None else float(sinks[h])
        kv = h // (HEADS // KV_HEADS)
        expected = scalar_attention(
            Q[t, h].tolist(), K[:, kv].tolist(), V[:, kv].tolist(), int(positions[t]), window, sink
        )
        assert_same_bits(got[t, h], np.array(expected, np.float32))


@pytest.mark.parametrize("name", [*PROFILES, "vllm-0.32-cpu", "megatron-0.16-local"])
def test_is_close_to_float64(name: str) -> None:
    got = attention(Q, POSITIONS, DenseKeyValues(K, V), contract_of(name))
    for h in range(HEADS):
        scores = Q[:, h].astype(np.float64) @ K[:, h // 2].astype(np.float64).T / math.sqrt(D)
        scores = np.where(POSITIONS[:, None] >= POSITIONS, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        exact = p / p.sum(axis=1, keepdims=True) @ V[:, h // 2].astype(np.float64)
        assert np.abs(got[:, h] - exact).max() < 0.03


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("tile", [1, 7, 64, 150])
def test_query_tile_does_not_matter(name: str, tile: int) -> None:
    kv = DenseKeyValues(K, V)
    tiles = [attention(Q[i : i + tile], POSITIONS[i : i + tile], kv, contract_of(name)) for i in range(0, T, tile)]
    assert_same_bits(REFERENCE[name], np.concatenate(tiles))


@settings(max_examples=15, deadline=None)
@given(name=ANY_PROFILE, page=st.sampled_from([1, 3, 16, 48, 256]), chunk=st.integers(1, T), seed=st.integers(0, 999))
def test_pages_block_table_and_prefill_chunk_do_not_matter(name: str, page: int, chunk: int, seed: int) -> None:
    """Chunks see only the keys written so far; every other slot of the cache is NaN."""
    pages = -(-T // page)
    cache = empty_cache(pages + 3, page, KV_HEADS, D)
    table = np.random.default_rng(seed).permutation(pages + 3)[:pages]
    parts = []
    for start in range(0, T, chunk):
        stop = min(start + chunk, T)
        kv = PagedKeyValues(cache, table, stop, KvCacheContract())
        write_cache(cache, kv.slots(start, stop), K[start:stop], V[start:stop], KvCacheContract())
        parts.append(attention(Q[start:stop], POSITIONS[start:stop], kv, contract_of(name)))
    assert_same_bits(REFERENCE[name], np.concatenate(parts))


@settings(max_examples=10, deadline=None)
@given(name=ANY_PROFILE, order=st.permutations(range(6)))
def test_batch_composition_does_not_matter(name: str, order: list[int]) -> None:
    positions = np.array([3, 64, 149, 0, 63, 100])[order]
    got = attention(Q[positions], positions, DenseKeyValues(K, V), contract_of(name))
    assert_same_bits(REFERENCE[name][positions], got)


@pytest.mark.parametrize("name", PROFILES)
def test_a_packed_sequence_has_its_own_origin(name: str) -> None:
    """The strict contract counts blocks from the sequence; one that counts from the packed buffer has other bits."""
    kv = DenseKeyValues(K, V)
    strict = contract_of(name)
    assert_same_bits(REFERENCE[name], attention(Q, POSITIONS, kv, strict, packed_offset=100))
    packed = strict.override("domain.block_origin", "packed_buffer")
    assert_same_bits(REFERENCE[name], attention(Q, POSITIONS, kv, packed, packed_offset=128))
    assert not same_bits(REFERENCE[name], attention(Q, POSITIONS, kv, packed, packed_offset=100))


@pytest.mark.parametrize("name", PROFILES)
def test_masked_keys_take_no_part(name: str) -> None:
    """Neither their values nor whole masked blocks matter, not even Inf and NaN."""
    keys, values = K.copy(), V.copy()
    keys[60:], values[60:] = np.inf, np.nan
    got = attention(Q[:60], POSITIONS[:60], DenseKeyValues(keys, values), contract_of(name))
    assert_same_bits(REFERENCE[name][:60], got)
    windowed = attention(Q[140:], POSITIONS[140:], DenseKeyValues(K, V), contract_of(name), window=9)
    keys, values = K.copy(), V.copy()
    keys[:132], values[:132] = np.nan, np.inf
    again = attention(Q[140:], POSITIONS[140:], DenseKeyValues(keys, values), contract_of(name), window=9)
    assert_same_bits(windowed, again)


def test_a_window_over_everything_is_no_window() -> None:
    got = attention(Q, POSITIONS, DenseKeyValues(K, V), EXACT, window=T)
    assert_same_bits(REFERENCE["strict-v1/fma32-seq"], got)


@pytest.mark.parametrize("split", ["fixed-128", "equal-4"])
def test_a_split_has_one_meaning_in_prefill_and_decode(split: str) -> None:
    q, k, v = random(5, 400, 1, D), random(6, 400, 1, D), random(7, 400, 1, D)
    contract = EXACT.override("partition.split", split)
    prefill = attention(q, np.arange(400), DenseKeyValues(k, v), contract)
    for i in (5, 130, 399):
        decode = attention(q[i : i + 1], np.array([i]), DenseKeyValues(k[: i + 1], v[: i + 1]), contract)
        assert_same_bits(prefill[i : i + 1], decode)
    one_pass = attention(q, np.arange(400), DenseKeyValues(k, v), EXACT)
    assert not same_bits(one_pass, prefill)
    first = 128 if split == "fixed-128" else 64  # rows that have nothing to split yet
    assert_same_bits(one_pass[:first], prefill[:first])


def test_a_dominant_sink_takes_everything() -> None:
    for place in ("first", "last"):
        sinks = np.full(HEADS, 1e4, np.float32)
        got = attention(Q, POSITIONS, DenseKeyValues(K, V), EXACT.override("order.sink", place), sinks=sinks)
        assert (got == 0).all() and not np.signbit(got).any()


def test_edges() -> None:
    def row(q: float, k: list[float], v: list[float]) -> float:
        keys, values = (np.array(x, np.float32).reshape(-1, 1, 1) for x in (k, v))
        at = np.array([len(k) - 1])
        return float(attention(np.full((1, 1, 1), q, np.float32), at, DenseKeyValues(keys, values), EXACT)[0, 0, 0])

    assert str(row(1.0, [0.0], [-0.0])) == "0.0"  # never -0
    assert row(1.0, [0.0, -8192.0], [2.0, 2.0**100]) == 2.0  # p is exactly 0 there
    assert math.isnan(row(math.nan, [1.0], [1.0])) and math.isnan(row(1.0, [math.inf, 0.0], [1.0, 1.0]))
    assert row(0.0, [1.0, 1.0], [2.0**127, 2.0**127]) == math.inf  # the weighted sum overflows before the division
    assert row(0.0, [1.0], [2.0**-133]) == 2.0**-133


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"positions": np.array([150])},
            ValueError,
            r"positions\[0\] = 150 is outside the sequence's keys \(0 to 149\)",
        ),
        ({"positions": np.array([1, 2])}, ValueError, "positions: expected 1, one per query"),
        ({"q": np.zeros((1, 3, D), np.float32)}, ValueError, "3 heads are not a multiple of the 2 KV heads"),
        ({"q": np.zeros((1, 4, 8), np.float32)}, ValueError, "q: head_dim 8 differs from the keys' 16"),
        ({"q": np.zeros((1, 4), np.float32)}, ValueError, r"q: expected shape \[tokens, heads, head_dim\]"),
        ({"q": np.zeros((1, 4, D), np.float64)}, TypeError, "q: expected dtype float32"),
        ({"q": np.full((1, 4, D), 1.001, np.float32)}, ValueError, "q: 1.00.* is not a bfloat16 value"),
        ({"window": 0}, ValueError, "window: needs a causal mask and at least 1 key"),
        ({"sinks": np.zeros(3, np.float32)}, ValueError, r"sinks: axis 0 \(heads\) must be 4"),
        ({"scale": -1.0}, ValueError, "scale: must be finite and above 0"),
    ],
)
def test_bad_input(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"q": Q[:1], "positions": np.array([0]), "kv": DenseKeyValues(K, V), "contract": CONTRACT}
    with pytest.raises(error, match=message):
        attention(**{**arguments, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition.split": "fixed-128", "partition.block": 256}, "must be a multiple of partition.block"),
        ({"partition.split": "equal-2", "order.keys": "descending"}, "needs order.keys 'ascending'"),
        ({"order.normalise": "before_values"}, "needs partition.block 0"),
        ({"rounding.query": "bfloat16"}, "must be 'float32' unless primitives.scale is 'query'"),
        ({"primitives.exp": "exp", "primitives.scale": "separate"}, "needs an exponential of base 2"),
    ],
)
def test_impossible_contracts(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CONTRACT.replace(changes)  # type: ignore[arg-type]
