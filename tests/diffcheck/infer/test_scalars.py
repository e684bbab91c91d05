"""A scalar that is not the model's is found from a side's bits, said with both values, and never guessed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffcheck.base.bits import UIntArray
from diffcheck.base.models import make_random_model
from diffcheck.capture.interventions import BitFlip
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.reference import Adapter
from diffcheck.infer import explain, infer
from diffcheck.infer.arguments import Arguments, call
from diffcheck.infer.candidates import Candidates
from diffcheck.infer.report import why
from diffcheck.infer.scalar_search import FoundScalar, find_scalar
from diffcheck.infer.search import Clock
from diffcheck.infer.sites import Site, site
from diffcheck.infer.weights import TracedWeights
from diffcheck.localize import localize
from diffcheck.trace.reader import Trace
from reference import operators as ops
from reference.models.config import ModelConfig
from reference.primitives.rope_scaling import RopeParameters
from tests.diffcheck.engine_cases import scored_samples
from tests.schemas import conforms

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}
PROFILE = "strict-v1/hopper-k16"
ATTENTION = "layers.0.self_attn"
Capture = Callable[..., Trace]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_random_model(folder, **SHAPE)
    return folder


@pytest.fixture(scope="module")
def capture(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """capture(**keys of config.json, interventions=()): a trace of the reference with these in place of the model's.

    The record says the model's own values, as that of an engine would whose kernel has another.
    """

    def run(interventions: tuple[Any, ...] = (), **keys: Any) -> Trace:
        folder = tmp_path_factory.mktemp("changed") / "model"
        shutil.copytree(model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | keys))
        samples = scored_samples(ModelConfig.from_folder(model))
        plan = CapturePlan(samples=samples, out=folder.parent / "trace", phase="prefill", interventions=interventions)
        options = EngineOptions("reference", folder, profile=PROFILE)
        trace = Trace(Adapter(options, lambda *_: None).capture(plan, lambda *_: None).trace)
        if keys:
            record = own[0].header.object
            for name in ("model", "rope", "rope_tables", "layers"):
                setattr(trace.header.object, name, getattr(record, name))
        return trace

    own = [run()]
    return run


@pytest.fixture(scope="module")
def honest(capture: Capture) -> Trace:
    return capture()


def question_of(trace: Trace, name: str, model: Path) -> Site:
    return site(trace, name, TracedWeights(model, trace.header.object.weights, trace.header.dtype))


def found_in(question: Site, compute: Callable[[Arguments, Any], Any]) -> FoundScalar | None:
    """What is found where a side has the bits of ``compute(arguments, contract)`` at ``question``."""
    candidates = Candidates.of(question)
    contract = dict(candidates.known())[PROFILE]
    got = np.asarray(compute(question.arguments, contract), np.float32).reshape(question.target.shape)
    bits: UIntArray = got.view(np.uint32)
    if question.dtype == "bfloat16":
        assert not (bits & 0xFFFF).any()
        bits = (bits >> 16).astype(np.uint16)
    return find_scalar(replace(question, target=bits), candidates, 64, [], Clock(120), lambda *_: None)


def theta(value: float) -> dict[str, Any]:
    return {"rope_theta": value, "rope_parameters": {"rope_theta": value, "rope_type": "default"}}


@pytest.mark.parametrize(
    ("name", "keys", "scalar", "value", "configured"),
    [
        ("layers.0.input_layernorm", {"rms_norm_eps": 1e-3}, "epsilon", 1e-3, 1e-6),
        (f"{ATTENTION}.q_norm", {"rms_norm_eps": 0.0371}, "epsilon", 0.0371, 1e-6),
        (
            f"{ATTENTION}.q_rope",
            theta(5e5),
            "theta",
            5e5,
            1e6,
        ),
        (
            f"{ATTENTION}.k_rope",
            theta(23456.0),
            "theta",
            23456.0,
            1e6,
        ),
    ],
)
def test_a_scalar_of_the_model_is_found_and_said_with_both_values(
    name: str, keys: dict[str, Any], scalar: str, value: float, configured: float, capture: Capture, model: Path
) -> None:
    answer = infer(capture(**keys), name, model)
    assert answer.status == "no_match" and answer.scalar is not None, answer.reason
    assert answer.scalar.scalar.name == scalar and answer.scalar.scalar.configured == configured
    assert answer.scalar.lowest <= value <= answer.scalar.highest
    plain = answer.to_json()
    conforms("inference", plain)
    low, high = answer.scalar.lowest, answer.scalar.highest
    # A value that the bits do not tell from its neighbours is never said alone.
    said = f"{answer.scalar.value:.9g} or another from {low:.9g} to {high:.9g}, which have the same bits,"
    assert low < high and f"computes with {scalar} {said}" in plain["cause"]
    assert f"where the model's configuration makes it {configured:.9g}" in plain["cause"]
    assert value == 23456.0 or answer.scalar.value == value
    assert f"0 of {answer.elements:,} elements differ" in plain["cause"]


def test_the_side_that_departs_is_named(honest: Trace, capture: Capture, model: Path) -> None:
    other = capture(rms_norm_eps=1e-3)
    verdict = localize(honest, other)
    assert verdict.first_divergence is not None and verdict.first_divergence.boundary == "layers.0.input_layernorm"
    contracts = explain(verdict, honest, other, model)
    left, right = contracts["left"][0], contracts["right"][0]
    assert left["status"] == "match" and left["scalar"] is None and right["scalar"]["value"] == 1e-3
    departs, follows = why(left, right, contracts["differs_in"])
    assert departs.startswith(f"{right['engine']} departs from the model: it computes with epsilon 0.001")
    assert left["engine"] in follows and "follows" in follows


def test_a_bit_that_no_scalar_explains_gets_none(capture: Capture, model: Path) -> None:
    for name in ("layers.0.input_layernorm", f"{ATTENTION}.q_rope"):
        answer = infer(capture(interventions=(BitFlip(name, 1, 12, 5),)), name, model)
        assert answer.status == "no_match" and answer.scalar is None and answer.to_json()["cause"] == ""


def test_noise_in_every_element_gets_no_scalar(honest: Trace, model: Path) -> None:
    """Elements times factors of their own: close to a factor of 1.25, and none."""
    question = question_of(honest, "layers.0.mlp.act", model)
    factors = np.random.default_rng(0).choice(np.array([1.25, 1.265625], np.float32), question.target.shape)

    def noisy(a: Arguments, contract: Any) -> Any:
        x = call(a, contract) * factors
        return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    assert found_in(question, noisy) is None


@pytest.mark.parametrize("scale", [1.0, 0.0837])
def test_a_softmax_scale(scale: float, honest: Trace, model: Path) -> None:
    question = question_of(honest, f"{ATTENTION}.attention", model)

    def attention(a: Arguments, contract: Any) -> Any:
        q = a.rows["x"].reshape(len(a), -1, a.facts["head_dim"])
        out = np.zeros_like(q)
        for s in a.sequences:
            for keys in np.unique(a.rows["keys"][a.rows["sample"] == s]):
                mine = np.flatnonzero((a.rows["sample"] == s) & (a.rows["keys"] == keys))
                kv = ops.DenseKeyValues(a.sequences[s].keys[:keys], a.sequences[s].values[:keys])
                out[mine] = ops.attention(q[mine], a.rows["position"][mine], kv, contract, scale=scale)
        return out

    found = found_in(question, attention)
    assert found is not None and found.scalar.name == "scale" and found.value == scale
    assert found.scalar.configured == pytest.approx(32**-0.5)


def test_a_bias_left_out(honest: Trace, model: Path) -> None:
    question = question_of(honest, f"{ATTENTION}.k_proj", model)
    weight = question.arguments.weights["weight"]
    bias = np.array([0.5, -0.25] * (len(weight) // 2), np.float32)
    question = replace(question, arguments=replace(question.arguments, weights={"weight": weight, "bias": bias}))
    found = found_in(question, lambda a, contract: ops.linear(a.rows["x"], weight, contract, None))
    assert found is not None and found.scalar.name == "bias" and found.value == 0.0
    assert "without the bias" in found.sentence


def test_a_temperature_inside_the_log_softmax(honest: Trace, model: Path) -> None:
    question = question_of(honest, "logsumexp", model)
    found = found_in(
        question, lambda a, c: ops.logsumexp(np.divide(a.rows["x"], np.float32(0.7), dtype=np.float32), c).value
    )
    assert found is not None and (found.scalar.name, found.value) == ("temperature", 0.7)


def test_an_attention_factor_of_rope(honest: Trace, model: Path) -> None:
    """Found as the table's factor: YaRN's for a factor of 4."""
    question = question_of(honest, f"{ATTENTION}.q_rope", model)
    factor = 0.1 * float(np.log(4)) + 1
    own = ModelConfig.from_folder(model).rope_base
    base = own if isinstance(own, RopeParameters) else RopeParameters(float(own))
    theta = replace(base, attention_factor=factor)
    found = found_in(question, lambda a, c: call(replace(a, facts={**a.facts, "theta": theta}), c))
    assert found is not None and found.scalar.name == "attention_factor"
    assert found.lowest <= factor <= found.highest
