"""Contracts as data: canonical form, validation, space, differences, profiles."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json

import pytest

from reference.contract import (
    CONTRACTS,
    Contract,
    describe,
    diff,
    fields,
    from_json,
    operator_name,
    override,
    profile,
    profiles,
    space,
)
from reference.contract.base import GROUPS
from reference.operators import LinearContract, RmsNormContract, SwigluContract
from reference.operators.linear import Rounding

ALL = [(name, operator) for name in profiles.names() for operator in sorted(CONTRACTS)]
EVERY_PROFILE = pytest.mark.parametrize(("name", "operator"), ALL)


@EVERY_PROFILE
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_json_is_canonical_and_survives_a_round_trip(name: str, operator: str, dtype: str) -> None:
    contract = profile(name).contract(operator, dtype)
    text = contract.to_json()
    data = json.loads(text)
    assert text == json.dumps(data, sort_keys=True, separators=(",", ":")) and text.isascii()
    assert set(data) == {"schema", "operator", *GROUPS}
    assert from_json(text) == contract
    assert contract.contract_id == hashlib.sha256(text.encode()).hexdigest()


def test_the_id_is_stable() -> None:
    """A change here changes the meaning of every stored contract: raise SCHEMA with it."""
    assert SwigluContract().to_json() == (
        '{"domain":{},"operator":"swiglu","order":{},"partition":{},"precision":{},"primitives":{"silu":"rlk"},'
        '"rounding":{"output":"bfloat16","silu":"float32"},"schema":1}'
    )


@pytest.mark.parametrize("operator", sorted(CONTRACTS))
def test_every_field_is_reachable_by_path(operator: str) -> None:
    contract = CONTRACTS[operator]()
    for path, allowed in fields(CONTRACTS[operator]).items():
        assert contract.get(path) == allowed.values[0]
        assert len(set(allowed.values)) == len(allowed.values)
        for value in allowed.values:
            assert "{" not in allowed.words(value) and allowed.words(value) != f"uses {value}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        contract.rounding = contract.rounding  # type: ignore[misc]


def test_override() -> None:
    changed = override(SwigluContract(), "rounding.silu", "bfloat16")
    assert changed.get("rounding.silu") == "bfloat16" and SwigluContract().get("rounding.silu") == "float32"
    assert changed.contract_id != SwigluContract().contract_id


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rounding.gate", "bfloat16", "swiglu has no contract field 'rounding.gate'; nearest: rounding"),
        ("silu", "bfloat16", "no contract field 'silu'"),
        ("rounding.silu", "int8", "rounding.silu must be one of 'float32', 'bfloat16', 'float16'; got 'int8'"),
        ("rounding.silu", 32, "got 32"),
    ],
)
def test_bad_override(path: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        override(SwigluContract(), path, value)


def test_values_are_typed() -> None:
    with pytest.raises(ValueError, match=r"partition.segments must be one of"):
        LinearContract().override("partition.segments", True)
    with pytest.raises(TypeError, match="rms_norm: rounding must be a Rounding"):
        RmsNormContract(rounding=Rounding())  # type: ignore[arg-type]


def edited(**changes: object) -> str:
    data = SwigluContract().as_dict()
    return json.dumps({**data, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "contract is not JSON"),
        ("[]", "contract must be a JSON object, got list"),
        (edited(schema=2), "contract schema must be 1, got 2"),
        (edited(operator="softmax"), "unknown operator 'softmax'; nearest: "),
        (edited(colour="red"), "swiglu contract has unknown field 'colour'"),
        (edited(rounding={"silu": "float32"}), "swiglu: rounding lacks field 'output'"),
        (edited(rounding={"silu": "float32", "output": "bfloat16", "x": 1}), "swiglu: rounding has unknown field 'x'"),
        (edited(rounding=3), "swiglu: rounding must be an object, got int"),
        (edited(rounding={"silu": "e9m9", "output": "bfloat16"}), "rounding.silu must be one of"),
        (json.dumps({"schema": 1, "operator": "swiglu"}), "swiglu contract lacks field 'domain'"),
    ],
)
def test_bad_json(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(text)


@pytest.mark.parametrize("operator", sorted(CONTRACTS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_space_holds_valid_distinct_contracts_and_every_profile(operator: str, dtype: str) -> None:
    around = space(operator, dtype)
    some = list(itertools.islice(around, 300))
    assert len({c.contract_id for c in some}) == len(some) and all(c in around for c in some)
    assert 1 <= len(some) <= around.bound
    for name in profiles.names():
        assert profile(name).contract(operator, dtype) in around, name


@pytest.mark.parametrize("operator", sorted(CONTRACTS))
def test_neighbours_differ_in_one_field(operator: str) -> None:
    base: Contract = CONTRACTS[operator]()
    for path, neighbour in space(operator).neighbours(base):
        assert [d.path for d in diff(base, neighbour)] == [path]


def test_space_restriction() -> None:
    part = space("rms_norm").restrict({"order.sum": ("chain", "cascade-8x4"), "rounding.sum": "float32"})
    found = list(part)
    assert {c.get("order.sum") for c in found} == {"chain", "cascade-8x4"}
    assert {c.get("rounding.sum") for c in found} == {"float32"}
    assert len(found) < len(list(space("rms_norm")))
    with pytest.raises(ValueError, match=r"rms_norm has no contract field 'order.colour'"):
        space("rms_norm").restrict({"order.colour": "red"})
    with pytest.raises(ValueError, match="is not in the space"):
        space("rms_norm").restrict({"order.sum": "random"})
    with pytest.raises(ValueError, match="unknown operator 'softmax'"):
        space("softmax")


def test_impossible_combinations_are_left_out() -> None:
    for contract in space("logprob"):
        assert contract.get("order.formula") == "log(softmax(x))" or contract.get("primitives.exp") == "rlk"


def test_diff_says_that_vllm_normalises_the_unrounded_sum() -> None:
    strict, vllm = profile("strict-v1").contract("rms_norm"), profile("vllm-0.32-cpu").contract("rms_norm")
    sentences = {d.path: d.sentence for d in diff(vllm, strict, "vLLM", "strict-v1")}
    assert sentences["rounding.sum"] == (
        "vLLM normalises the unrounded float32 residual sum; "
        "strict-v1 rounds the residual sum to bfloat16 before it normalises it."
    )
    assert diff(strict, strict) == []
    with pytest.raises(ValueError, match="two operators"):
        diff(strict, profile("strict-v1").contract("swiglu"))


@EVERY_PROFILE
def test_describe_is_complete(name: str, operator: str) -> None:
    contract = profile(name).contract(operator)
    text = describe(contract)
    assert contract.contract_id[:16] in text
    for path in fields(type(contract)):
        assert path.split(".")[1] in text


@pytest.mark.parametrize(
    ("alias", "operator"),
    [
        ("RMSNorm", "rms_norm"),
        ("layers.3.mlp.act", "swiglu"),
        ("layers.0.self_attn.o_proj.partial", "row_linear"),
        ("logits", "lm_head"),
        ("k_cache", "kv_cache"),
        ("attention", "attention"),
    ],
)
def test_operator_aliases(alias: str, operator: str) -> None:
    assert operator_name(alias) == operator


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown profile 'strict-v9'; nearest: strict-v1"):
        profile("strict-v9")
    with pytest.raises(ValueError, match="unknown operator 'conv'"):
        profile("strict-v1").contract("conv")
    with pytest.raises(ValueError, match="dtype must be bfloat16, float16 or float32, got 'int8'"):
        profile("strict-v1").contract("linear", "int8")


def test_native_profiles_say_what_they_do_not_model() -> None:
    for name in ("vllm-0.32-cpu", "megatron-0.16-local", "transformers-5-eager"):
        assert {"linear", "row_linear", "lm_head", "attention"} <= set(profile(name).unmodelled)
    assert not profile("strict-v1").unmodelled
