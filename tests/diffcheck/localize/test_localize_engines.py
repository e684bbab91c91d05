"""The main job on real engines: what diverges is named, what is another object is refused, what is equal is equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from diffcheck.base.boundaries import Boundary, graph
from diffcheck.base.errors import ExitCode
from diffcheck.base.models import built_in_samples, resolve_model
from diffcheck.base.samples import Sample
from diffcheck.capture.interventions import BitFlip
from diffcheck.capture.overrides import parse_override
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.session import EngineSession
from diffcheck.localize import localize
from diffcheck.localize.verdict import Verdict
from diffcheck.rows import expected_rows
from diffcheck.runs import RunSettings, run_localize
from diffcheck.trace.reader import Trace
from tests.diffcheck.cli.test_cli import rlk
from tests.schemas import conforms

pytestmark = pytest.mark.engines

FOLDER, CONFIG = resolve_model("tiny-qwen3")
#: Long prompts cost time and show nothing new here.
SAMPLES = tuple(s for s in built_in_samples("tiny-qwen3", FOLDER, CONFIG) if len(s.token_ids) < 50)
ROWS = expected_rows(SAMPLES)
ENGINES = ("vllm", "megatron")
NODES = graph(CONFIG)


@dataclass
class Live:
    """An engine that stays up, and its honest trace."""

    session: EngineSession
    honest: Trace
    folder: Path
    runs: int = 0

    def capture(self, **changes: object) -> Trace:
        self.runs += 1
        plan = CapturePlan(**{"samples": SAMPLES, "out": self.folder / f"run{self.runs}", **changes})  # type: ignore[arg-type]
        return Trace(self.session.capture(plan).trace)


@pytest.fixture(scope="module", params=ENGINES)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp(request.param)
    with EngineSession(EngineOptions(request.param, FOLDER), lambda *_: None) as session:
        engine = Live(session, None, folder)  # type: ignore[arg-type]
        engine.honest = engine.capture()
        yield engine


@pytest.mark.parametrize("node", NODES, ids=lambda b: b.name)
def test_the_last_mantissa_bit_flipped_on_one_side_is_named_exactly(node: Boundary, live: Live) -> None:
    """At every boundary: this boundary, sample, position and element, and nothing before it differs."""
    if node.name in live.honest.header.unobserved:
        pytest.skip(f"{live.honest.header.engine}: {live.honest.header.unobserved[node.name]}")
    rows = ROWS[node.rows]
    row = len(rows) - 3
    where = (int(rows.sample[row]), int(rows.position[row]))
    index = node.width // 2
    changed = live.capture(interventions=(BitFlip(node.name, *where, index, bit=0),))
    verdict = localize(live.honest, changed)
    first = verdict.first_divergence
    assert verdict.exit_code is ExitCode.DIVERGED and first is not None
    assert (first.boundary, first.sample, first.position, first.index) == (node.name, *where, index)
    # log_softmax is one operator in both engines: what lies inside it can only be enclosed.
    expected = ["logsumexp", "logprobs"] if node.name == "logprobs" else [node.name]
    assert (first.interval, first.differing, first.max_ulp) == (expected, 1, 1)
    assert first.role == ("origin" if len(expected) == 1 else "interval")
    before = [r for r in verdict.boundaries[: [b.name for b in NODES].index(node.name)] if r.status != "unobserved"]
    assert all(r.status == "equal" for r in before)
    assert all(r.status != "origin" for r in verdict.boundaries if r.name != node.name)


def test_a_bit_absorbed_on_the_way_is_still_named(live: Live) -> None:
    """Equal logprobs are no alibi: a difference that rounding swallows later is reported where it arose."""
    name = "layers.0.input_layernorm"
    changed = live.capture(interventions=(BitFlip(name, 0, 0, 0, bit=0),))
    verdict = localize(live.honest, changed)
    assert verdict.first_divergence is not None and verdict.first_divergence.boundary == name


def test_digests_alone_name_the_boundary_and_the_row(live: Live) -> None:
    name = "layers.2.mlp.act"
    honest = live.capture(level="digest")
    changed = live.capture(level="digest", interventions=(BitFlip(name, 1, 20, 3),))
    first = localize(honest, changed).first_divergence
    assert first is not None and (first.boundary, first.sample, first.position, first.index) == (name, 1, 20, None)


def run(rollout: str, train: str, **changes: object) -> Verdict:
    settings = replace(RunSettings(generate=8), **changes)  # type: ignore[arg-type]
    verdict, _ = run_localize(settings, rollout, train, lambda *_: None)
    return verdict


def test_the_default_run_names_the_norm(tmp_path: Path) -> None:
    """vLLM rounds the normalised value to bfloat16 before the weight multiplies it; torch.nn.RMSNorm only after."""
    out = tmp_path / "v.json"
    done = rlk("localize", "--json", str(out), "--generate", "8")
    assert done.returncode == ExitCode.DIVERGED, done.stderr
    verdict = json.loads(out.read_text())
    conforms("verdict", verdict)
    assert verdict["first_divergence"]["boundary"] == "layers.0.input_layernorm"
    assert verdict["first_divergence"]["role"] == "origin" and verdict["first_divergence"]["max_ulp"] == 1
    assert verdict["coverage"]["unobserved"] == ["logsumexp"]
    assert verdict["logprobs"]["mismatch_count"] == verdict["logprobs"]["compared"] == 6 * 8
    assert verdict["evidence"]["left"]["evidence"]["scheduler"]["max_decoding_in_step"] >= 4


@pytest.mark.parametrize("engine", ["vllm", "megatron", "transformers", "reference"])
def test_an_engine_equals_itself(engine: str) -> None:
    verdict = run(engine, engine)
    assert verdict.exit_code is ExitCode.EQUAL, verdict.summary
    assert verdict.coverage.expected == len(NODES)
    unseen = [] if engine == "reference" else ["logsumexp"]
    assert list(verdict.coverage.unobserved) == unseen


def test_two_ranks_against_one_give_a_verdict() -> None:
    verdict = run("megatron", "megatron", train_tensor_parallel=2)
    assert verdict.verdict in ("equal", "diverged") and verdict.coverage.observed == len(NODES) - 1
    if verdict.first_divergence is not None:
        # Column-parallel layers only split the output; the first sum that two ranks share is a row-parallel one.
        assert verdict.first_divergence.boundary.rpartition(".")[2] in ("o_proj", "q_proj", "k_proj", "v_proj")


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Megatron generates for the built-in samples, as a trace."""
    folder = tmp_path_factory.mktemp("rollout")
    run("megatron", "reference", keep=folder)
    return folder / "rollout-megatron"


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("object: swap_tokens=0,1,2", "token_ids[sample 0][1]"),
        ("object: position_offset=1", "positions[sample 0][0]"),
        ("weights.model.layers.1.mlp.up_proj.weight: flip=77", "weights.model.layers.1.mlp.up_proj.weight"),
        ("object: rope_theta=500000", "rope.theta"),
        ("object: temperature=0.7", "temperature"),
    ],
)
@pytest.mark.parametrize("train", ["megatron", "reference"])
def test_another_object_is_not_comparable(train: str, override: str, field: str, rollout: Path) -> None:
    # Against the reference the rollout is a trace, made once; both sides are live against Megatron.
    side = "megatron" if train == "megatron" else str(rollout)
    verdict = run(side, train, overrides=(parse_override(override),))
    assert verdict.exit_code is ExitCode.NOT_COMPARABLE
    assert field in [m.field for m in verdict.not_comparable]
    assert verdict.first_divergence is None and not verdict.boundaries


def test_rollouts_recorded_elsewhere_are_scored_against_a_live_engine(tmp_path: Path) -> None:
    """A trace as one side, an engine as the other: a cluster's rollout on a laptop."""
    out = tmp_path / "rollout"
    samples = tmp_path / "s.jsonl"
    samples.write_text("".join(json.dumps(s.to_json()) + "\n" for s in SAMPLES[:2]))
    done = rlk(
        "capture", "--engine", "transformers", "--samples", str(samples), "--out", str(out), "--phase", "prefill"
    )
    assert done.returncode == 0, done.stderr
    verdict = run(str(out), "megatron")
    assert verdict.exit_code is ExitCode.DIVERGED and verdict.logprobs is not None
    assert verdict.logprobs.compared == sum(len(s.response_token_ids) for s in SAMPLES[:2])
    recorded = [Sample.from_json(s) for s in Trace(out).header.samples]
    assert all(s.rollout_logprobs and np.isfinite(s.rollout_logprobs).all() for s in recorded)
