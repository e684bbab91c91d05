"""A mixture of experts in the reference's forward: one set of bits, whoever shares an expert with whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diffcheck.base.checkpoint import FloatWeights
from diffcheck.base.models import built_in_samples, resolve_model
from reference.contract.profiles import profile
from reference.models.qwen3 import forward
from reference.models.weights import weight_shapes

NAME = "tiny-qwen3-moe"
FOLDER, CONFIG = resolve_model(NAME)
STORED = FloatWeights(FOLDER, "bfloat16")
WEIGHTS = {name: STORED[name] for name, _ in weight_shapes(CONFIG)}
SAMPLES = built_in_samples(NAME, FOLDER, CONFIG)[:3]


def bits(samples: Any = SAMPLES, **changes: Any) -> list[list[int]]:
    given = {"prompt_lengths": [len(s.prompt_token_ids) for s in samples], **changes}
    found = forward(WEIGHTS, CONFIG, [s.token_ids for s in samples], profile("strict-v1/fma32-seq"), **given)
    return [x.view(np.uint32).tolist() for x in found.logprobs]


def test_batch_chunk_phase_and_ranks_change_no_bit() -> None:
    """An expert's product has as many rows as tokens chose it: its sums must not depend on that."""
    whole = bits()
    assert bits(SAMPLES[:1]) + bits(SAMPLES[1:]) == whole
    assert bits(phase="decode") == whole
    assert bits(chunk=3) == whole
    assert bits(tensor_parallel=2) == whole


@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        ("layers.*.mlp.gate", {"rounding.output": "float32"}),
        ("layers.*.mlp.scores", {"rounding.weights": "bfloat16"}),
        ("layers.*.mlp.scores", {"order.bias": "choice_and_weight"}),
        ("layers.2.mlp.combine", {"primitives.accumulate": "mul_add", "rounding.product": "bfloat16"}),
        ("layers.0.mlp.experts.*.act", {"rounding.silu": "bfloat16"}),
    ],
)
def test_an_override_reaches_the_operators_of_experts(pattern: str, change: dict[str, Any]) -> None:
    """And a correction bias does nothing in a model without one."""
    assert (bits(overrides={pattern: change}) == bits()) is ("order.bias" in change)


def test_the_model_says_whether_weights_are_divided_by_their_sum() -> None:
    folder, config = resolve_model("tiny-qwen3-moe-unnormed")
    stored = FloatWeights(folder, "bfloat16")
    sums: dict[bool, set[bool]] = {}
    for c in (CONFIG, config):
        seen: list[Any] = []

        def observe(name: str, _s: Any, _p: Any, values: Any, seen: list[Any] = seen) -> None:
            if name.endswith("topk_weights"):
                seen.append(np.nansum(values, axis=1))

        weights = {name: stored[name] for name, _ in weight_shapes(c)}
        forward(weights, c, [SAMPLES[0].token_ids], profile("strict-v1/fma32-seq"), observe=observe)
        sums[c.norm_topk_prob] = set((np.abs(np.concatenate(seen) - 1) < 1e-6).tolist())
    assert sums == {True: {True}, False: {False}}
