"""Inference names the contract that a side followed, among all of the space, and says so when it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diffcheck.base.boundaries import graph
from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.models import make_random_model
from diffcheck.capture.interventions import BitFlip
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.reference import Adapter
from diffcheck.infer import differences, explain, infer
from diffcheck.infer.arguments import call
from diffcheck.infer.candidates import Candidates
from diffcheck.infer.probes import probe_arguments
from diffcheck.infer.repeat import unrepeated, withdraw
from diffcheck.infer.search import Clock, search
from diffcheck.infer.sites import UnknowableError, site
from diffcheck.infer.trial import Trial, same_bits
from diffcheck.infer.weights import TracedWeights
from diffcheck.localize import localize
from diffcheck.trace.reader import Trace
from reference.contract import profile, space
from reference.models.config import ModelConfig
from tests.diffcheck.cli.test_cli import rlk
from tests.diffcheck.engine_cases import scored_samples
from tests.diffcheck.infer.conftest import SHAPE

Capture = Callable[..., Trace]


@pytest.fixture(scope="module")
def capture(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """capture(profile, **fields of the plan, tensor_parallel=1): a trace of the reference."""
    kept: dict[str, Trace] = {}

    def run(name: str, tensor_parallel: int = 1, **plan: object) -> Trace:
        key = repr((name, tensor_parallel, plan))
        if key not in kept:
            options = EngineOptions("reference", model, profile=name, tensor_parallel=tensor_parallel)
            adapter = Adapter(options, lambda *_: None)
            samples = scored_samples(ModelConfig.from_folder(model))
            out = tmp_path_factory.mktemp("traces") / "trace"
            whole = CapturePlan(**{"samples": samples, "out": out, "phase": "prefill", **plan})  # type: ignore[arg-type]
            kept[key] = Trace(adapter.capture(whole, lambda *_: None).trace)
        return kept[key]

    return run


def weights_of(trace: Trace, model: Path) -> TracedWeights:
    return TracedWeights(model, trace.header.object.weights, trace.header.dtype)


CONFIG = ModelConfig.from_dict(
    {
        **SHAPE,
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
    }
)
ENGINES = ("vllm-0.32-cpu", "megatron-0.16-local", "strict-v1/hopper-k16")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_boundary_is_recomputed_from_its_own_inputs(engine: str, capture: Capture, model: Path) -> None:
    """The question is put right everywhere: under the contract that was followed, the recorded inputs give the recorded
    bits, in decode as in prefill.
    """
    for phase in ("decode", "prefill"):
        trace = capture(engine, phase=phase)
        for node in graph(CONFIG):
            if node.name == "logprobs" and engine != ENGINES[2]:
                continue  # its formula reads the sum inside the log-sum-exp, which no boundary shows
            question = site(trace, node.name, weights_of(trace, model))
            candidates = Candidates.of(question)
            trial = Trial(question, rows=64)
            score = trial.score(dict(candidates.known())[engine], trial.levels[-1])
            assert score is not None and score.fits, (phase, node.name)
            assert score.elements == len(question.arguments) * node.width


@pytest.mark.parametrize("name", ["layers.0.self_attn.k_norm", "layers.0.self_attn.q_rope", "layers.0.mlp.act"])
@pytest.mark.parametrize("engine", ENGINES[:2])
def test_the_contract_that_was_followed_is_in_the_class(name: str, engine: str, capture: Capture, model: Path) -> None:
    answer = infer(capture(engine, phase="decode"), name, model, budget=300)
    assert answer.status == "match" and answer.complete and engine in answer.profiles
    assert answer.matching == answer.elements > 0


def test_a_contract_that_cannot_show_is_inconclusive(capture: Capture, model: Path) -> None:
    answer = infer(capture("strict-v1"), "embed_tokens", model)
    assert answer.status == "inconclusive" and "decide nothing" in answer.reason


@pytest.mark.parametrize("name", ["layers.0.self_attn.k_proj", "layers.0.mlp.down_proj"])
def test_the_order_of_a_matrix_product_is_found(name: str, capture: Capture, model: Path) -> None:
    trace = capture("strict-v1/mfma-cdna3-g8")
    answer = infer(trace, name, model, budget=300)
    assert answer.status == "match" and "strict-v1/mfma-cdna3-g8" in answer.profiles
    assert answer.tried == answer.space > 100 and answer.complete


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("layers.0.mlp.act", "swiglu"),
        ("layers.0.self_attn.q_rope", "rope"),
        ("layers.0.self_attn.k_norm", "qk_norm"),
        ("layers.0.self_attn.v_proj", "linear"),
    ],
)
def test_nothing_that_fits_is_missed_and_nothing_else_is_named(
    name: str, operator: str, capture: Capture, model: Path
) -> None:
    """Screening and the merging of equal computations against trying contracts of the whole space on all rows."""
    trace = capture("megatron-0.16-local", phase="decode")
    question = site(trace, name, weights_of(trace, model))
    candidates = Candidates.of(question)
    trial = Trial(question, rows=8)
    found = search(trial, candidates, Clock(300), lambda *_: None)
    assert found.complete
    fitting = {candidates.values(c) for c in found.fits}
    rng = np.random.default_rng(3)
    whole = list(space(operator))
    for i in rng.permutation(len(whole))[:100]:
        contract = whole[i].replace(question.given)
        score = trial.score(contract, trial.levels[-1])
        fits = score is not None and score.fits
        assert fits == (candidates.canonical(candidates.values(contract)) in fitting), contract.to_json()


def test_a_contract_that_no_profile_has_is_found_in_the_largest_space(capture: Capture, model: Path) -> None:
    """Attention's space cannot be walked whole; the search goes field by field."""
    changed = {"rounding.scores": "bfloat16", "rounding.row_sum": "bfloat16"}
    trace = capture("strict-v1", contract_overrides={"layers.0.self_attn.attention": changed})
    answer = infer(trace, "layers.0.self_attn.attention", model, budget=25)
    assert answer.status == "match" and not answer.complete and "too large" in answer.reason
    assert {path: answer.decided.get(path) for path in changed} == changed


def test_two_sides_differ_in_words(capture: Capture, model: Path) -> None:
    vllm, megatron = capture("vllm-0.32-cpu", phase="decode"), capture("megatron-0.16-local", phase="decode")
    name = "layers.0.post_attention_layernorm"
    sides = [replace(infer(t, name, model), engine=e) for t, e in ((vllm, "vllm"), (megatron, "megatron"))]
    found = {d["field"]: d["sentence"] for d in differences(*sides)}
    assert set(found) == {"rounding.normalised", "rounding.sum"}
    assert found["rounding.sum"].startswith("vllm normalises the unrounded float32 residual sum; megatron rounds")
    assert differences(sides[0], sides[0]) == []


def test_the_first_divergence_is_explained(capture: Capture, model: Path) -> None:
    left = capture("strict-v1")
    right = capture("strict-v1", contract_overrides={"layers.*.mlp.act": {"rounding.silu": "bfloat16"}})
    verdict = localize(left, right)
    explain(verdict, left, right, model)
    assert verdict.first_divergence is not None and verdict.first_divergence.boundary == "layers.0.mlp.act"
    assert [d["field"] for d in verdict.contracts["differs_in"]] == ["rounding.silu"]
    assert verdict.contracts["left"][0]["status"] == verdict.contracts["right"][0]["status"] == "match"
    json.dumps(verdict.to_json(), allow_nan=False)


def test_a_cause_outside_the_space_is_no_match(capture: Capture, model: Path) -> None:
    """One bit of one element that no contract explains: the nearest is called nearest, and no field is blamed."""
    name = "layers.0.mlp.act"
    left, right = capture("strict-v1"), capture("strict-v1", interventions=(BitFlip(name, 1, 12, 5),))
    answer = infer(right, name, model)
    assert answer.status == "no_match" and not answer.fits and answer.nearest is not None and answer.complete
    assert answer.nearest_fields["rounding.silu"] == "float32"
    assert (answer.elements - answer.matching, answer.rows_failing, answer.max_ulp) == (1, 1, 1)
    verdict = localize(left, right)
    assert explain(verdict, left, right, model)["differs_in"] == []


def test_a_replaced_residual_hides_the_sum(capture: Capture, model: Path) -> None:
    trace = capture("strict-v1", interventions=(BitFlip("layers.0.attn_residual", 0, 1, 2),))
    answer = infer(trace, "layers.0.post_attention_layernorm", model)
    assert answer.status == "match"
    reasons = {u.path: u.reason for u in answer.undecided}
    assert "something replaced it" in reasons["rounding.sum"]


def test_missing_observations_are_named(capture: Capture, model: Path) -> None:
    digests = capture("strict-v1", level="digest")
    assert "only digests" in infer(digests, "norm", model).reason
    sampled = capture("strict-v1", level="sampled", sampled_rows=6)
    norm = infer(sampled, "norm", model)
    assert norm.status == "match" and (norm.rows, norm.total_rows) == (6, 31)
    attention = infer(sampled, "layers.0.self_attn.attention", model)
    assert attention.status == "inconclusive" and "holds only some" in attention.reason
    with pytest.raises(UnknowableError, match="not captured"):
        site(capture("strict-v1", layers=(0, 0)), "layers.0.mlp.act", weights_of(sampled, model))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_unobserved_log_sum_exp_is_taken_from_the_profiles(engine: str, capture: Capture, model: Path) -> None:
    """Engines fuse it into the log-softmax: then the profiles' own are tried, and the answer says which was taken."""
    trace = Trace(capture(engine, phase="decode").folder)
    del trace.header.boundaries["logsumexp"]
    answer = infer(trace, "logprobs", model)
    assert answer.status == "match" and not answer.complete
    assert answer.matching == answer.elements == 15
    assert "was not observed: it is taken as in" in answer.reason
    formula = "x - lse" if engine.startswith("strict") else "(x - max) - log(sum)"
    assert answer.decided.get("order.formula", formula) == formula


def test_other_weights_are_refused(capture: Capture, tmp_path: Path) -> None:
    make_random_model(tmp_path, **SHAPE, rms_norm_eps=1e-5)
    trace = capture("strict-v1")
    assert infer(trace, "norm", tmp_path).status == "match"  # the same weights in another folder
    trace.header.object.weights["model.norm.weight"] = "0" * 64
    try:
        with pytest.raises(InputError, match=r"model\.norm\.weight is not the one") as error:
            infer(trace, "norm", tmp_path)
    finally:
        trace.header.object.weights["model.norm.weight"] = weight_digest_of(tmp_path)
    assert error.value.exit_code is ExitCode.NOT_COMPARABLE
    with pytest.raises(InputError, match="not one of this model"):
        infer(trace, "layers.9.mlp.act", tmp_path)


def weight_digest_of(folder: Path) -> str:
    from safetensors.torch import load_file

    from diffcheck.base.record import weight_digest

    return weight_digest(load_file(folder / "model.safetensors")["model.norm.weight"])


def test_a_spent_budget_is_inconclusive_and_ctrl_c_too(capture: Capture, model: Path) -> None:
    trace = capture("strict-v1")
    answer = infer(trace, "norm", model, budget=1e-6)
    assert (answer.status, answer.tried, answer.complete) == ("inconclusive", 0, False)
    assert "time budget" in answer.reason

    def interrupt(what: str, done: int, _total: int) -> None:
        if "contracts" in what and done == 40:
            raise KeyboardInterrupt

    answer = infer(trace, "norm", model, progress=interrupt)
    assert (answer.status, answer.tried) == ("inconclusive", 40) and "interrupted" in answer.reason
    assert answer.nearest is not None or not answer.matching


def test_what_was_not_confirmed_in_time_decides_nothing(capture: Capture, model: Path) -> None:
    """Ctrl-C while the last rows are looked at: fields on which only the confirmed contracts agree stay open."""
    trace, name = capture("strict-v1"), "layers.0.self_attn.k_norm"
    whole = infer(trace, name, model, probe=False)

    def interrupt(what: str, done: int, _total: int) -> None:
        if "31 of 31" in what and done == 1:
            clock.interrupted = True

    clock = Clock(300)
    question = site(trace, name, weights_of(trace, model))
    found = search(Trial(question, rows=8), Candidates.of(question), clock, interrupt)
    assert len(found.fits) <= 2 and not found.complete and found.stopped == "it was interrupted"
    assert set(whole.fits) <= {*found.fits, *found.pending}


def test_a_generated_input_really_decides(capture: Capture, model: Path) -> None:
    trace = capture("strict-v1")
    answer = infer(trace, "layers.0.mlp.act", model)
    (open_field,) = [u for u in answer.undecided if u.path == "primitives.silu"]
    assert open_field.probe is not None
    arguments = site(trace, "layers.0.mlp.act", weights_of(trace, model)).arguments
    made = probe_arguments(arguments, open_field.probe["kind"], open_field.probe["seed"], "bfloat16")
    outputs = [call(made, next(c for c in answer.fits if c.contract_id == i)) for i in open_field.probe["contract_ids"]]
    assert np.count_nonzero(~same_bits(*outputs)) == open_field.probe["differing"] > 0


def test_ranks_partial_sums_and_their_reduction(capture: Capture, model: Path) -> None:
    trace = capture("strict-v1", tensor_parallel=2)
    partial = infer(trace, "layers.0.mlp.down_proj.partial", model, budget=300)
    assert partial.status == "match" and "strict-v1/fma32-seq" in partial.profiles
    assert partial.decided["primitives.unit"] == "fma32-seq"
    merged = infer(trace, "layers.0.mlp.down_proj", model)
    assert merged.operator == "all_reduce" and merged.status == "match"


def test_profiles_stay_in_their_own_space() -> None:
    """What is followed must be among what is searched, or inference could never name it."""
    for name in ("vllm-0.32-cpu", "megatron-0.16-local", "transformers-5-eager"):
        for operator in ("rms_norm", "rope", "swiglu", "attention", "linear", "lm_head"):
            assert profile(name).contract(operator) in space(operator)


def test_the_command(capture: Capture, model: Path, tmp_path: Path) -> None:
    trace, out = capture("strict-v1"), tmp_path / "answer.json"
    common = [str(trace.folder), "--model", str(model)]
    done = rlk("infer", *common, "--boundary", "norm", "--json", str(out))
    assert done.returncode == ExitCode.EQUAL, done.stderr
    assert "MATCH" in done.stdout and "strict-v1/fma32-seq" in done.stdout
    answer = json.loads(out.read_text())
    assert answer["status"] == "match" and answer["decided"]["rounding.normalised"] == "float32"
    assert rlk("infer", *common, "--boundary", "embed_tokens").returncode == ExitCode.INCONCLUSIVE
    refused = rlk("infer", *common, "--boundary", "layers.0.mlp.silu")
    assert refused.returncode == ExitCode.USAGE and "remedy:" in refused.stderr


def test_a_side_that_does_not_repeat_itself_is_not_explained(capture: Capture) -> None:
    """The left engine gives other bits in its second run, so that its divergence from the right one proves nothing."""
    left, right = capture("strict-v1"), capture("megatron-0.16-local")
    other = capture("strict-v1", interventions=(BitFlip("layers.0.mlp.act", 0, 3, 1),), level="digest")
    verdict = localize(left, right)
    assert not withdraw(verdict, {"left": unrepeated(left, left), "right": unrepeated(right, right)})
    assert verdict.verdict == "diverged" and verdict.evidence["repeats"] == {"left": True, "right": True}
    assert withdraw(verdict, {"left": unrepeated(left, other), "right": ""})
    assert verdict.exit_code is ExitCode.INCONCLUSIVE and verdict.evidence["repeats"]["left"] is False
    assert "reference does not repeat itself" in verdict.summary
    assert "layers.0.mlp.act (sample 0, position 3)" in verdict.summary


def test_localize_runs_live_sides_twice(model: Path, tmp_path: Path) -> None:
    out, keep = tmp_path / "v.json", tmp_path / "traces"
    sides = ["--rollout", "reference", "--train", "reference", "--model", str(model)]
    change = ["--override", "layers.*.mlp.act: rounding.silu=bfloat16"]
    done = rlk("localize", "--infer", *sides, *change, "--keep", str(keep), "--json", str(out))
    assert done.returncode == ExitCode.DIVERGED, done.stderr
    verdict = json.loads(out.read_text())
    assert verdict["evidence"]["repeats"] == {"left": True, "right": True}
    assert [d["field"] for d in verdict["contracts"]["differs_in"]] == ["rounding.silu"]
    assert sorted(p.name for p in keep.iterdir() if p.is_dir()) == ["rollout-reference", "train-reference"]


@pytest.mark.engines
def test_real_engines_are_explained(tmp_path: Path) -> None:
    """vLLM rounds x/rms before the weight and normalises the unrounded sum; Megatron does neither."""
    out = tmp_path / "v.json"
    page = tmp_path / "report.html"
    outputs = ["--keep", str(tmp_path / "traces"), "--json", str(out), "--html", str(page)]
    done = rlk("localize", "--infer", "--generate", "8", *outputs)
    assert done.returncode == ExitCode.DIVERGED, done.stderr
    words = "vllm rounds x/rms to bfloat16 before the weight multiply; megatron keeps x/rms in float32"
    assert words in done.stdout.replace("\n", " ") and words in page.read_text()
    verdict = json.loads(out.read_text())
    assert [d["field"] for d in verdict["contracts"]["differs_in"]] == ["rounding.normalised"]
    assert verdict["evidence"]["repeats"] == {"left": True, "right": True}
    from diffcheck.base.models import resolve_model

    folder, _ = resolve_model("tiny-qwen3")
    name = "layers.0.post_attention_layernorm"
    sides = [infer(Trace(tmp_path / "traces" / t), name, folder) for t in ("rollout-vllm", "train-megatron")]
    assert [s.status for s in sides] == ["match", "match"]
    assert {d["field"] for d in differences(*sides)} == {"rounding.normalised", "rounding.sum"}
