"""Overrides: one line of text becomes exactly one change on one side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample
from diffcheck.capture.interventions import BitFlip
from diffcheck.capture.overrides import apply_overrides, parse_override
from diffcheck.capture.plan import CapturePlan, EngineOptions


def applied(text: str, engine: str = "vllm") -> tuple[EngineOptions, CapturePlan]:
    options = EngineOptions(engine, Path("m"))
    plan = CapturePlan((Sample((1, 2), (3, 4)), Sample((5,), (6,))), Path("o"))
    return apply_overrides([parse_override(text)], options, plan)


def test_sides() -> None:
    assert parse_override("norm: flip=0,1,2").side == "train"
    assert parse_override("rollout/norm: flip=0,1,2").side == "rollout"
    with pytest.raises(InputError, match="neither rollout nor train"):
        parse_override("left/norm: flip=0,1,2")


def test_flip_of_a_boundary() -> None:
    _, plan = applied("layers.1.mlp.act: flip=1,2,3,4")
    assert plan.interventions == (BitFlip("layers.1.mlp.act", 1, 2, 3, 4),)


def test_flip_of_a_weight() -> None:
    options, _ = applied("weights.model.norm.weight: flip=5,2")
    assert options.weight_flips == (("model.norm.weight", 5, 2),)


def test_object_fields() -> None:
    assert applied("object: temperature=0.7")[1].temperature == 0.7
    assert applied("object: top_k=5")[1].top_k == 5
    assert applied("object: position_offset=1")[1].position_offset == 1
    assert applied("object: rope_theta=5e5")[0].model_overrides == {"rope_theta": 5e5}


def test_swapped_tokens_cross_the_prompt() -> None:
    _, plan = applied("object: swap_tokens=0,1,2")
    assert plan.samples[0].token_ids == (1, 3, 2, 4) and plan.samples[1] == Sample((5,), (6,))


def test_contract_fields_only_where_contracts_are_followed() -> None:
    text = "layers.*.mlp.act: rounding.silu=bfloat16"
    _, plan = applied(text, "reference")
    assert plan.contract_overrides == {"layers.*.mlp.act": {"rounding.silu": "bfloat16"}}
    with pytest.raises(InputError, match="follows no contract"):
        applied(text, "vllm")


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "norm flip=1",
        "norm: flip",
        ": flip=0,0,0",
        "norm: flip=1,2",
        "norm: flip=a,b,c",
        "norm: flip=0,-1,0",
        "weights.x: scale=2",
        "object: colour=1",
        "object: temperature=hot",
        "object: temperature=0",
        "object: swap_tokens=0,1,99",
    ],
)
def test_malformed_overrides_are_refused_with_their_text(text: str) -> None:
    with pytest.raises(InputError) as caught:
        applied(text)
    assert text in caught.value.cause and caught.value.remedy


def test_plans_and_options_survive_json() -> None:
    """What is sent to an engine's process is what was planned."""
    options, plan = applied("layers.0.mlp.act: flip=1,2,3")
    options = EngineOptions.from_json(json.loads(json.dumps(options.to_json())))
    assert CapturePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert options == EngineOptions("vllm", Path("m"))
