"""Ablation on the reference engine: faults on purpose are all named, nothing else is, and what is unknown is said."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffcheck.ablate import Ablation, Side, ablation, composite, units
from diffcheck.ablate import walk as walking
from diffcheck.ablate.contracts import Known
from diffcheck.ablate.walk import steps_planned
from diffcheck.base.boundaries import graph
from diffcheck.base.errors import ExitCode
from diffcheck.base.samples import save_samples
from diffcheck.capture.adapter import CaptureResult
from diffcheck.capture.interventions import BitFlip
from diffcheck.capture.plan import CapturePlan
from tests.diffcheck.ablate.bench import Bench
from tests.diffcheck.cli.test_cli import rlk

#: Override -> boundaries of the one-layer model at which it alone parts the sides, on equal inputs.
FAULTS = {
    "layers.*.input_layernorm: rounding.normalised=bfloat16": ["layers.0.input_layernorm"],
    "layers.*.self_attn.?_norm: rounding.normalised=bfloat16": [
        "layers.0.self_attn.q_norm",
        "layers.0.self_attn.k_norm",
    ],
    "layers.*.self_attn.?_rope: precision.table=bfloat16": ["layers.0.self_attn.q_rope", "layers.0.self_attn.k_rope"],
    "layers.*.self_attn.attention: rounding.scores=bfloat16": ["layers.0.self_attn.attention"],
    "layers.*.post_attention_layernorm: rounding.sum=float32": ["layers.0.post_attention_layernorm"],
    "layers.*.mlp.act: rounding.silu=bfloat16": ["layers.0.mlp.act"],
    "logsumexp: rounding.logits=bfloat16": ["logsumexp"],
    "logprobs: order.formula=log(softmax(x))": ["logprobs"],
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def honest(bench: Bench) -> Side:
    return bench.side("rollout")


def boundaries(answer: Ablation) -> list[str]:
    return sorted(b for unit in answer.units for b in unit.boundaries)


def check_explained(answer: Ablation) -> None:
    """The set closes the gap, every member is needed, and each forward was proven by an engine."""
    assert answer.status == "explained" and answer.minimal_verified, answer.reason
    assert answer.together is not None and answer.together.logprobs.mismatch_count == 0
    for unit in answer.units:
        assert unit.alone is not None and unit.left_out is not None
        assert {unit.alone.evidence, unit.left_out.evidence} == {"engine"}
        assert (unit.left_out.logprobs.mismatch_count > 0) or not unit.in_minimal
    assert all(origin.confirmed is not False for origin in answer.origins)


@pytest.mark.parametrize("faults", [*itertools.combinations(FAULTS, 1), *itertools.combinations(FAULTS, 2)], ids=str)
def test_one_and_two_faults_are_named_and_no_innocent(faults: tuple[str, ...], bench: Bench, honest: Side) -> None:
    faulty = bench.side("train", *faults)
    answer = bench.ablate(faulty, honest)
    assert boundaries(answer) == sorted(b for fault in faults for b in FAULTS[fault])
    check_explained(answer)
    assert {u.name for u in answer.units} == {o.unit for o in answer.origins}
    # Where a profile's contract stands for both sides, the field that was overridden is named, and no other.
    for unit in answer.units:
        named = {d["field"] for d in unit.differs_in}
        assert named <= {
            f.partition(": ")[2].partition("=")[0] for f in faults if set(unit.boundaries) <= set(FAULTS[f])
        }
        if unit.operator != "logprob":
            # Seven logprobs are too few to tell two formulas apart on each side's own inputs.
            assert bool(named) == bool(unit.donor_contract and unit.host_contract)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("host_role", ["rollout", "train"])
def test_either_side_and_phase_may_be_changed(phase: str, host_role: str, bench: Bench) -> None:
    """A row is put in for its (sample, position), however the two sides batch."""
    faults = ("layers.*.mlp.act: rounding.silu=bfloat16", "layers.*.self_attn.?_rope: precision.table=bfloat16")
    donor = bench.side("train" if host_role == "rollout" else "rollout", phase="prefill")
    host = bench.side(host_role, *faults, phase=phase)
    answer = bench.ablate(host, donor)
    assert boundaries(answer) == sorted(b for fault in faults for b in FAULTS[fault])
    check_explained(answer)


def test_a_fused_norm_is_told_from_its_residual(bench: Bench) -> None:
    """The donor normalises the unrounded sum: the norm is named, not the residual add, and its operator is the
    reference's under that contract.
    """
    donor = bench.side("rollout", profile="vllm-0.32-cpu")
    host = bench.side("train", profile="megatron-0.16-local")
    answer = bench.ablate(host, donor)
    check_explained(answer)
    assert "layers.0.post_attention_layernorm" in boundaries(answer)
    assert not [b for b in boundaries(answer) if b.endswith("residual")]
    named = {u.name: u for u in answer.units}
    assert named["layers.0.post_attention_layernorm"].donor_contract == "vllm-0.32-cpu"


def test_two_faults_that_only_together_are_everything(bench: Bench, honest: Side) -> None:
    """Alone, aligning either leaves every logprob different; together, none."""
    faulty = bench.side(
        "train", "layers.*.input_layernorm: rounding.normalised=bfloat16", "logprobs: order.formula=log(softmax(x))"
    )
    answer = bench.ablate(faulty, honest)
    (pair,) = answer.pairs
    first = answer.units[0]
    assert first.alone is not None and first.alone.removed.count < 1
    assert sum(pair.alone) < pair.trial.removed.mean == 1.0 == pair.trial.removed.count


def test_a_difference_on_which_no_logprob_depends_is_named_and_not_blamed(bench: Bench, honest: Side) -> None:
    """In a model of one layer no later token reads the MLP of the first one."""
    flip = BitFlip("layers.0.mlp.act", 0, 0, 3)
    answer = bench.ablate(bench.side("train", interventions=(flip,)), honest)
    assert boundaries(answer) == ["layers.0.mlp.act"]
    assert answer.status == "explained" and "absorbed" in answer.summary and not answer.minimal
    faulty = bench.side("train", "logsumexp: rounding.logits=bfloat16", interventions=(flip,))
    answer = bench.ablate(faulty, honest)
    assert boundaries(answer) == ["layers.0.mlp.act", "logsumexp"]
    assert answer.minimal == ["logsumexp"] and answer.minimal_verified
    assert answer.together is not None and answer.together.aligned == ["logsumexp"]


def test_a_fault_that_no_contract_makes_is_settled_by_the_engines(bench: Bench, honest: Side) -> None:
    """The faulty operator's own engine recomputes it on the forward's inputs."""
    flips = tuple(BitFlip(f"layers.0.mlp.{name}", 0, 4, 3, bit=6) for name in ("gate_proj", "down_proj"))
    answer = bench.ablate(bench.side("train", interventions=flips), honest)
    assert [u.host_contract for u in answer.units] == ["", ""]
    assert answer.minimal == ["layers.0.mlp.gate_proj", "layers.0.mlp.down_proj"]
    check_explained(answer)


def test_values_that_the_other_side_cannot_hold_are_aligned_behind(bench: Bench, honest: Side) -> None:
    """Transformers keeps logits in bfloat16, the reference in float32: what reads them is aligned, and both named."""
    answer = bench.ablate(bench.side("train", engine="transformers", profile=None), honest)
    assert "do not fit" in answer.unaligned["logits"]
    (unit,) = [u for u in answer.units if u.boundaries == ["processed_logits"]]
    assert unit.interval == ["logits", "processed_logits"]
    check_explained(answer)
    assert "logits → processed_logits" in answer.summary


def test_what_was_not_observed_is_no_one_to_blame(bench: Bench) -> None:
    """With the layer hidden, the cause is said to lie in it, and no boundary of it is named."""
    honest = bench.side("rollout", layers=(0, 0))
    faulty = bench.side("train", "layers.*.mlp.act: rounding.silu=bfloat16", layers=(0, 0))
    answer = bench.ablate(faulty, honest)
    (unit,) = answer.units
    assert unit.boundaries == ["norm"] and "layers.0.mlp.act" in unit.interval and len(unit.interval) > 10
    assert f"one of the {len(unit.interval)} from" in answer.summary


def test_a_unit_too_deep_for_the_turns_is_shown_to_be_needed_in_one_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without contracts each layer takes a turn. Where they are too many no forward is wasted on them."""
    monkeypatch.setattr(ablation, "known", lambda side, *_: Known(side.name))
    monkeypatch.setattr(composite, "TURNS", 3)
    monkeypatch.setattr(units, "FEW", 0)
    bench = Bench(tmp_path, ((3, 2),), num_hidden_layers=4)
    kinds = ("layers.*.input_layernorm: rounding.normalised=bfloat16", "layers.*.mlp.act: rounding.silu=bfloat16")
    answer = bench.ablate(bench.side("train", *kinds), bench.side("rollout"))
    for unit in answer.units:
        assert unit.alone is None and unit.left_out is not None
        assert unit.left_out.evidence == "engine" and unit.left_out.place == unit.boundaries[0]
        assert unit.left_out.logprobs.mismatch_count > 0 and unit.left_out.runs <= 4
    assert answer.status == "explained" and answer.minimal_verified and not answer.pairs


def test_a_forward_that_the_turns_do_not_settle_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two units in one layer has its inputs only after the first has its own."""
    names = ["layers.0.input_layernorm", "layers.0.mlp.gate_proj", "layers.0.mlp.down_proj"]
    bench = Bench(tmp_path)
    flips = tuple(BitFlip(name, 0, 4, 3, bit=6) for name in names)
    host, donor = bench.side("train", interventions=flips), bench.side("rollout")
    nodes = graph(bench.config)
    table = composite.Bench(host, donor, nodes, [n.name for n in nodes], bench.model, names)
    monkeypatch.setattr(composite, "TURNS", 2)
    made = composite.compose(table, donor, host, names[1:])
    assert made.evidence == "unproven" and "layers.0.mlp.down_proj was not settled after 2 turns" in made.note
    monkeypatch.setattr(composite, "TURNS", 3)
    assert composite.compose(table, donor, host, names[1:]).evidence == "engine"


def trace_only(side: Side) -> Side:
    return replace(side, engine=None, plan=None)


def test_a_recorded_donor_is_believed_as_far_as_a_contract_reaches(bench: Bench, honest: Side) -> None:
    faults = ("layers.*.input_layernorm: rounding.normalised=bfloat16", "layers.*.mlp.act: rounding.silu=bfloat16")
    answer = bench.ablate(bench.side("train", *faults), trace_only(honest))
    assert answer.status == "explained" and answer.minimal_verified
    evidence = {t.evidence for u in answer.units for t in (u.alone, u.left_out) if t}
    assert evidence == {"inputs", "contract"}
    # Flipped bits are no contract: the donor's other operators on other inputs are unknown, and so is what is needed.
    flips = tuple(BitFlip(f"layers.0.mlp.{name}", 0, 4, 3, bit=6) for name in ("gate_proj", "down_proj"))
    odd = trace_only(bench.side("rollout", interventions=flips))
    answer = bench.ablate(bench.side("train"), odd)
    assert boundaries(answer) == ["layers.0.mlp.down_proj", "layers.0.mlp.gate_proj"]
    assert answer.together is not None and answer.together.logprobs.mismatch_count == 0
    assert "unproven" in {t.evidence for u in answer.units for t in (u.alone, u.left_out) if t}
    assert not answer.minimal_verified and "not proven" in answer.reason


@dataclass
class Deaf:
    """An engine that does not do what it is told at one boundary."""

    engine: Any
    boundary: str

    def capture(self, plan: CapturePlan) -> CaptureResult:
        heard = tuple(i for i in plan.interventions if i.boundary != self.boundary or not i.aligns)
        result: CaptureResult = self.engine.capture(replace(plan, interventions=heard))
        return result


def test_a_substitution_that_does_not_take_place_voids_the_answer(bench: Bench, honest: Side) -> None:
    faulty = bench.side("train", "layers.*.mlp.act: rounding.silu=bfloat16")
    deaf = replace(faulty, engine=Deaf(faulty.engine, "layers.0.mlp.act"))
    answer = bench.ablate(deaf, honest)
    assert answer.void and answer.status == "inconclusive" and not answer.minimal
    assert "did not take the values put in at layers.0.mlp.act" in answer.reason


@dataclass
class Failing:
    """An engine whose user loses patience, or whose time is up."""

    engine: Any
    after: int

    def capture(self, plan: CapturePlan) -> CaptureResult:
        self.after -= 1
        if self.after < 0:
            raise KeyboardInterrupt
        result: CaptureResult = self.engine.capture(plan)
        return result


def test_what_is_known_survives_an_interruption(bench: Bench, honest: Side) -> None:
    faulty = bench.side("train", "layers.*.mlp.act: rounding.silu=bfloat16")
    answer = bench.ablate(replace(faulty, engine=Failing(faulty.engine, 2)), honest)
    assert (answer.status, answer.reason) == ("inconclusive", "interrupted")
    assert boundaries(answer) == ["layers.0.mlp.act"] and answer.together is not None
    answer = bench.ablate(faulty, honest, budget=-1.0)
    assert answer.status == "inconclusive" and "budget" in answer.reason and not answer.units


def test_a_forward_on_its_own_tokens_is_its_own(bench: Bench, honest: Side) -> None:
    assert honest.unlike_itself() == ""
    assert honest.plan is not None
    flip = BitFlip("norm", 0, 4, 3)
    other = replace(honest, plan=replace(honest.plan, interventions=(flip,)))
    assert "two runs of it first differ at norm (sample 0, position 4)" in other.unlike_itself()


KINDS = (
    "layers.*.input_layernorm: rounding.normalised=bfloat16",
    "layers.*.mlp.act: rounding.silu=bfloat16",
)


def test_forwards_grow_with_the_logarithm_of_the_layers(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times the layers and the origins: at most four more forwards, two for each bisection."""
    monkeypatch.setattr(walking, "STEPS", 4)
    runs = {}
    for layers in (6, 24):
        bench = Bench(tmp_path_factory.mktemp(f"deep{layers}"), ((2, 2),), num_hidden_layers=layers)
        answer = bench.ablate(bench.side("train", *KINDS), bench.side("rollout"))
        check_explained(answer)
        assert len(answer.origins) == 2 * layers
        assert [u.name for u in answer.units] == [override.partition(":")[0] for override in KINDS]
        runs[layers] = sum(answer.runs.values())
        # Lockstep, everything aligned, two for each unit alone, left out and in a pair, and the bisections.
        assert runs[layers] <= 2 + 2 * (2 * 2 + 1) + steps_planned(len(answer.origins))
        check_bracket(answer)
    assert runs[24] - runs[6] <= 4


def check_bracket(answer: Ablation) -> None:
    """With the last origin that matters aligned nothing is left; without it something is."""
    last = [o.boundary for o in answer.origins].index(answer.bracket[1])
    after = [answer.origins[i].after for i in (last - 1, last)]
    assert [a is not None and a.mismatch_count > 0 for a in after] == [True, False]


def test_bisection_agrees_with_walking_every_step(bench: Bench, honest: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = bench.side("train", *FAULTS)
    every = bench.ablate(faulty, honest)
    assert all(o.after is not None for o in every.origins) and len(every.origins) > units.FEW
    monkeypatch.setattr(walking, "STEPS", 2)
    halved = bench.ablate(faulty, honest)
    assert halved.bracket == every.bracket and sum(o.after is None for o in halved.origins) > 0
    for a, b in zip(every.origins, halved.origins, strict=True):
        assert b.after is None or a.after == b.after
    shares = [o.explained for o in every.origins if o.explained is not None]
    assert np.isclose(sum(shares), 1.0)


def test_the_command_says_it_in_words_and_in_json(bench: Bench, tmp_path: Path) -> None:
    samples, out = tmp_path / "s.jsonl", tmp_path / "v.json"
    save_samples(samples, bench.samples)
    faults = list(FAULTS)[:2]
    overrides = [word for fault in faults for word in ("--override", fault)]
    sides = ("--rollout", "reference", "--train", "reference", "--model", str(bench.model), "--samples", str(samples))
    done = rlk("localize", *sides, *overrides, "--ablate", "--json", str(out))
    assert done.returncode == ExitCode.DIVERGED, done.stderr
    assert "plan: 3 origins in 3 units" in " ".join(done.stderr.split())
    verdict = json.loads(out.read_text())
    (answer,) = verdict["ablation"]
    assert sorted(answer["minimal"]) == sorted(b for fault in faults for b in FAULTS[fault])
    assert answer["together"]["removed"] == {"count": 1.0, "max": 1.0, "mean": 1.0}
    assert answer["together"]["logprobs"]["compared"] == verdict["logprobs"]["compared"] == 7
    assert {d["field"] for u in answer["units"] for d in u["differs_in"]} == {"rounding.normalised"}
    words = " ".join(done.stdout.replace("│", " ").split())
    assert "3 operators of rollout reference in train reference's forward make all 7 logprobs equal" in words
    assert "The set is minimal" in words and "Walking on" in words
