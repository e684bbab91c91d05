"""Ablation on real vLLM and Megatron-core: what parts them is named, and aligning it leaves no bit of difference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from diffcheck.ablate import Ablation, Side, ablate
from diffcheck.ablate.sides import same
from diffcheck.base.boundaries import graph
from diffcheck.base.errors import ExitCode
from diffcheck.base.models import make_random_model
from diffcheck.base.samples import Sample
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.session import EngineSession
from diffcheck.trace.reader import Trace
from reference.models.config import ModelConfig
from tests.diffcheck.cli.test_cli import rlk
from tests.schemas import conforms

pytestmark = pytest.mark.engines

MATRIX = {"linear", "row_linear", "lm_head"}


@dataclass
class Pair:
    """Both engines on a model of one layer, and what ablation said."""

    vllm: Side
    megatron: Side
    model: Path
    answer: Ablation

    @property
    def names(self) -> list[str]:
        return [n.name for n in graph(ModelConfig.from_folder(self.model)) if n.name not in self.answer.unaligned]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("ablate")
    model = folder / "model"
    model.mkdir()
    make_random_model(model, num_hidden_layers=1, vocab_size=131)
    rng = np.random.default_rng(2)
    samples = tuple(Sample(tuple(int(t) for t in rng.integers(3, 131, n)), ()) for n in (9, 4, 6))
    with (
        EngineSession(EngineOptions("vllm", model), lambda *_: None) as vllm,
        EngineSession(EngineOptions("megatron", model), lambda *_: None) as megatron,
    ):
        plan = CapturePlan(samples, folder / "vllm", generate=5)
        rollout = vllm.capture(plan)
        plan = replace(plan, samples=tuple(rollout.samples))
        scored = megatron.capture(replace(plan, out=folder / "megatron"))
        left = Side("rollout", Trace(rollout.trace), folder, vllm, plan)
        right = Side("train", Trace(scored.trace), folder, megatron, plan)
        answer = ablate(right, left, graph(ModelConfig.from_folder(model)), model)
        yield Pair(left, right, model, answer)


def test_aligned_they_agree_in_every_bit_and_nothing_aligned_is_spare(pair: Pair) -> None:
    answer = pair.answer
    assert answer.status == "explained" and answer.minimal_verified, answer.reason
    assert answer.baseline.mismatch_count == answer.baseline.compared == 15
    assert answer.together is not None and answer.together.logprobs.mismatch_count == 0
    trials = [t for u in answer.units for t in (u.alone, u.left_out) if t]
    assert {t.evidence for t in trials} == {"engine"} and {t.engine for t in trials} == {"vllm", "megatron"}
    operators = {u.operator for u in answer.units}
    assert {"rms_norm", "qk_norm", "rope", "attention"} <= operators
    # Cache, activation and residual adds are one arithmetic in both engines; matrix products too, but for single
    # elements where the number of rows made the library choose another kernel.
    assert not operators & {"kv_cache", "swiglu", "residual_add"}
    assert all(u.differing < u.elements / 100 for u in answer.units if u.operator in MATRIX)
    assert all(o.confirmed for o in answer.origins if o.after is not None)


def test_the_norms_rounding_and_the_fused_residual_are_causes(pair: Pair) -> None:
    """In words, with no field that could be the same in both engines."""
    units = {u.name: u for u in pair.answer.units}
    for boundary, fields in (
        ("layers.0.input_layernorm", ["rounding.normalised"]),
        ("layers.0.self_attn.k_norm", ["rounding.normalised"]),
        ("layers.0.self_attn.k_rope", ["rounding.product"]),
        ("layers.0.post_attention_layernorm", ["rounding.normalised", "rounding.sum"]),
    ):
        assert boundary in pair.answer.minimal
        assert sorted(d["field"] for d in units[boundary].differs_in) == fields
    sentences = [d["sentence"] for d in units["layers.0.post_attention_layernorm"].differs_in]
    assert any("vllm normalises the unrounded float32 residual sum" in sentence for sentence in sentences)


def test_values_put_into_a_decoding_engine_are_taken_row_by_row(pair: Pair) -> None:
    """vLLM decodes several requests at once; Megatron scored whole sequences. After the run vLLM's forward is
    Megatron's, and each of its operators was seen on Megatron's inputs.
    """
    run = pair.vllm.lockstep(pair.megatron.trace, pair.names)
    assert all(same(run.trace, pair.megatron.trace, name) for name in pair.names)
    operators = {n.name: n.operator for n in graph(ModelConfig.from_folder(pair.model))}
    differing = {name for name in pair.names if not same(run.given, pair.megatron.trace, name)}
    found = {o.boundary for o in pair.answer.origins}
    assert {operators[name] for name in differing ^ found} <= MATRIX
    assert run.trace.header.evidence["scheduler"]["max_decoding_in_step"] == 3


def test_operators_swapped_for_the_reference_are_the_engines_own(pair: Pair) -> None:
    """Contracts were found for the norms and the rotation of both engines, and no engine refuted them."""
    for unit in pair.answer.units:
        if unit.operator in ("rms_norm", "qk_norm", "rope"):
            assert unit.donor_contract == "vllm-0.32-cpu" and unit.host_contract == "megatron-0.16-local"
            assert unit.alone is not None and unit.alone.runs == 2


@pytest.mark.exhaustive
def test_the_command_on_the_built_in_model(tmp_path: Path) -> None:
    out = tmp_path / "v.json"
    done = rlk("localize", "--ablate", "--infer", "--json", str(out))
    assert done.returncode == ExitCode.DIVERGED, done.stderr
    conforms("verdict", json.loads(out.read_text()))
    (answer,) = json.loads(out.read_text())["ablation"]
    assert answer["status"] == "explained" and answer["together"]["logprobs"]["mismatch_count"] == 0
    causes = {d["field"] for u in answer["units"] if u["in_minimal"] for d in u["differs_in"]}
    assert {"rounding.normalised", "rounding.sum", "rounding.product"} <= causes
    assert "Ablation: vllm's operators in megatron's forward" in done.stdout


def test_two_traces_have_no_forward_to_change(pair: Pair, tmp_path: Path) -> None:
    folders = [str(side.trace.folder) for side in (pair.vllm, pair.megatron)]
    done = rlk("localize", "--rollout", folders[0], "--train", folders[1], "--ablate")
    assert done.returncode == ExitCode.USAGE and "both sides are traces" in done.stderr
    done = rlk("localize", "--ablate", "--level", "digest")
    assert done.returncode == ExitCode.USAGE and "--level full" in done.stderr
