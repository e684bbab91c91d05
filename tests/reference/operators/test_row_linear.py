"""Row-parallel projection: the bits do not depend on the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from reference.contract import profile
from reference.operators import (
    AllReduceContract,
    RowLinearContract,
    row_linear,
    row_linear_merge,
    row_linear_partial,
)
from tests.reference.exact import assert_same_bits, random, same_bits

CONTRACT = RowLinearContract()


def over_ranks(ranks: int, contract: RowLinearContract, reduction: AllReduceContract, bias: bool = True) -> np.ndarray:
    x, w = random(1, 3, 512), random(2, 5, 512)
    b = random(3, 5) if bias else None
    shards = zip(np.split(x, ranks, axis=1), np.split(w, ranks, axis=1), strict=True)
    partials = [row_linear_partial(a, v, contract, ranks, b if r == 0 else None) for r, (a, v) in enumerate(shards)]
    return row_linear_merge(partials, contract, reduction, b)


@pytest.mark.parametrize("name", ["strict-v1/fma32-seq", "strict-v1/mfma-cdna3-g8", "strict-v1/hopper-k16"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_closed_under_tensor_parallelism(name: str, ranks: int) -> None:
    contract = profile(name).contract("row_linear").override("rounding.output", "float32")
    reduction = profile(name).contract("all_reduce")
    whole = row_linear(random(1, 3, 512), random(2, 5, 512), contract, random(3, 5))  # type: ignore[arg-type]
    assert_same_bits(whole, over_ranks(ranks, contract, reduction))  # type: ignore[arg-type]


def test_a_chain_over_ranks_is_not_closed() -> None:
    contract = CONTRACT.override("rounding.output", "float32")
    chain = AllReduceContract().override("order.merge", "chain")
    assert not same_bits(over_ranks(8, contract, chain), over_ranks(8, contract, AllReduceContract()))


def test_native_engines_round_each_rank() -> None:
    native = profile("megatron-0.16-local")
    contract, reduction = native.contract("row_linear"), native.contract("all_reduce")
    assert not same_bits(over_ranks(1, contract, reduction), over_ranks(4, contract, reduction))  # type: ignore[arg-type]


def test_more_ranks_than_segments() -> None:
    one_segment = CONTRACT.replace({"partition.segments": 1, "rounding.output": "float32"})
    eight = CONTRACT.override("rounding.output", "float32")
    assert_same_bits(over_ranks(8, one_segment, AllReduceContract()), over_ranks(8, eight, AllReduceContract()))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="ranks: 8 segments cannot be shared evenly by 3 ranks"):
        row_linear_partial(random(1, 2, 8), random(2, 2, 8), CONTRACT, 3)
    with pytest.raises(ValueError, match="12 inputs cannot be cut into 8 equal segments"):
        row_linear(random(1, 2, 12), random(2, 2, 12), CONTRACT)
