"""lm_head: a linear layer whose output stays float32 unless the contract rounds it."""

from __future__ import annotations

import numpy as np

from reference.contract import profile
from reference.operators import LinearContract, LmHeadContract, linear, lm_head
from tests.reference.exact import assert_same_bits, random


def test_is_the_unrounded_linear_layer() -> None:
    x, w = random(1, 3, 64), random(2, 11, 64)
    unrounded = linear(x, w, LinearContract().override("rounding.output", "float32"))
    assert_same_bits(lm_head(x, w, LmHeadContract()), unrounded)
    assert (unrounded.view(np.uint32) & 0xFFFF).any()


def test_engines_round_logits() -> None:
    contract = profile("vllm-0.32-cpu").contract("lm_head")
    logits = lm_head(random(1, 3, 64), random(2, 11, 64), contract)  # type: ignore[arg-type]
    assert not (logits.view(np.uint32) & 0xFFFF).any()


def test_vocabulary_shards_are_independent() -> None:
    x, w = random(1, 3, 64), random(2, 12, 64)
    shards = [lm_head(x, shard, LmHeadContract()) for shard in np.split(w, 4)]
    assert_same_bits(lm_head(x, w, LmHeadContract()), np.concatenate(shards, axis=1))
