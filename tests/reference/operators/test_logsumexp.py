"""Log-sum-exp against a scalar specification; vocabulary shards, masked columns, edges."""

from __future__ import annotations

import numpy as np
import pytest

from reference.contract import profile
from reference.operators import LogsumexpContract, logsumexp
from reference.primitives import exp, log
from reference.reductions import lanes_tree as vector_lanes_tree
from reference.reductions import merge_tree
from tests.reference.exact import add, assert_same_bits, lanes_tree, one, random, tree

CONTRACT = LogsumexpContract()


@pytest.mark.parametrize("size", [8, 50, 333])
@pytest.mark.parametrize("segments", [1, 8])
def test_equals_scalar_specification(size: int, segments: int) -> None:
    x = random(size, 2, size, fmt="float32", scale=3.0)
    got = logsumexp(x, CONTRACT.override("partition.segments", segments))
    for t, row in enumerate(x.tolist()):
        largest = max(row)
        terms = [one(exp, add(v, -largest)) for v in row]
        width = -(-size // segments)
        parts = [terms[i * width : (i + 1) * width] for i in range(segments)]
        total = tree([lanes_tree(part) if part else 0.0 for part in parts])
        assert got.maximum[t] == np.float32(largest) and got.total[t] == np.float32(total)
        assert got.value[t] == np.float32(add(largest, one(log, total)))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_vocabulary_shards_merge_to_the_same_bits(ranks: int) -> None:
    """Each rank sums its own segments and merges them; the ranks' sums merge in the same tree."""
    x = random(1, 5, 4096, fmt="float32", scale=4.0)
    maximum = np.max([shard.max(axis=1) for shard in np.split(x, ranks, axis=1)], axis=0)
    per_rank = []
    for shard in np.split(x, ranks, axis=1):
        segments = np.split(exp(shard - maximum[:, None]), 8 // ranks, axis=1)
        per_rank.append(merge_tree([vector_lanes_tree(s) for s in segments]))
    assert_same_bits(maximum + log(merge_tree(per_rank)), logsumexp(x, CONTRACT).value)


def test_masked_columns_add_nothing() -> None:
    x = random(2, 3, 512, fmt="float32")
    masked = np.where(np.arange(512) % 3 == 0, np.float32(-np.inf), x)
    smallest = np.where(np.arange(512) % 3 == 0, np.float32(-1e30), x)
    assert_same_bits(logsumexp(masked, CONTRACT).total, logsumexp(smallest, CONTRACT).total)


@pytest.mark.parametrize("name", ["strict-v1", "vllm-0.32-cpu", "megatron-0.16-local"])
def test_is_close_to_float64(name: str) -> None:
    x = random(3, 8, 5000, fmt="float32", scale=5.0)
    exact = x.max(axis=1) + np.log(np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True)).sum(axis=1))
    contract = profile(name).contract("logsumexp")
    assert np.abs(logsumexp(x, contract).value - exact).max() < 4e-6  # type: ignore[arg-type]


def test_edges() -> None:
    def value(*row: float) -> float:
        return float(logsumexp(np.array([row], np.float32), CONTRACT).value[0])

    assert value(5.0) == 5.0 and value(-3e38, -3e38) == np.float32(-3e38)
    assert value(3e38, -3e38) == np.float32(3e38)
    assert np.isnan(value(np.inf, 1.0)) and np.isnan(value(np.nan, 1.0))
    assert value(2.0**-149, -np.inf) == 2.0**-149


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"logits\[1\]: every entry is -inf"):
        logsumexp(np.array([[0, 1], [-np.inf, -np.inf]], np.float32), CONTRACT)
    with pytest.raises(ValueError, match="the vocabulary is empty"):
        logsumexp(np.zeros((2, 0), np.float32), CONTRACT)
    with pytest.raises(TypeError, match="logits: expected dtype float32, got float64"):
        logsumexp(np.zeros((2, 3)), CONTRACT)  # type: ignore[arg-type]
