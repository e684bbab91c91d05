"""Real transformers, scoring and decoding: every boundary is what it says, nothing is disturbed, faults land."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffcheck.base.boundaries import graph
from diffcheck.base.errors import InputError, RlkError
from diffcheck.base.models import resolve_model
from diffcheck.base.record import weight_digest
from diffcheck.capture.adapter import CaptureResult
from diffcheck.capture.plan import EngineOptions
from diffcheck.capture.session import EngineSession
from diffcheck.trace.reader import Trace
from reference.models.config import ModelConfig
from reference.models.weights import weight_shapes
from tests.diffcheck.engine_cases import (
    DEVICE,
    FLOAT32,
    LENGTHS,
    Seen,
    check_fault,
    check_meaning,
    digests,
    fault_at,
    plan_for,
    scored_samples,
)

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engines

FOLDER, CONFIG = resolve_model("tiny-qwen3")
OPTIONS = EngineOptions("transformers", FOLDER, device=DEVICE, extra={"threads": 1})
FAULTS = [b for b in graph(CONFIG) if b.layer in (1, None) and b.operator != "logsumexp"]


def quiet(_what: str, _done: int, _total: int) -> None:
    return None


class Engine:
    """A session and the folder its traces go to."""

    def __init__(self, options: EngineOptions, out: Path) -> None:
        self.session = EngineSession(options, quiet)
        self.out = out
        self._count = 0

    def run(self, **changes: Any) -> CaptureResult:
        self._count += 1
        return self.session.capture(plan_for(CONFIG, self.out / str(self._count), **changes))

    def capture(self, **changes: Any) -> Trace:
        return Trace(self.run(**changes).trace)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    live = Engine(OPTIONS, tmp_path_factory.mktemp("transformers"))
    with live.session:
        yield live


@pytest.fixture(scope="module")
def scored(engine: Engine) -> Trace:
    return engine.capture()


@pytest.fixture(scope="module")
def decoded(engine: Engine) -> Trace:
    return engine.capture(phase="decode")


@pytest.fixture(params=["prefill", "decode"])
def honest(request: pytest.FixtureRequest, scored: Trace, decoded: Trace) -> Trace:
    return scored if request.param == "prefill" else decoded


def seen(trace: Trace, folder: Path = FOLDER, config: ModelConfig = CONFIG) -> Seen:
    from diffcheck.capture.live import Checkpoint

    weights = Checkpoint(folder, getattr(torch, trace.header.dtype))
    return Seen(trace, config, lambda name: weights[name].double().numpy())


def test_every_boundary_is_observed_but_the_one_inside_a_kernel(honest: Trace) -> None:
    expected = {b.name for b in graph(CONFIG)}
    assert set(honest.header.boundaries) == expected - {"logsumexp"}
    assert set(honest.header.unobserved) == {"logsumexp"}


def test_every_boundary_means_what_its_name_says(honest: Trace) -> None:
    check_meaning(seen(honest))


def test_object_record_is_the_checkpoint_and_the_samples(honest: Trace) -> None:
    record, samples = honest.header.object, scored_samples(CONFIG)
    weights = seen(honest).weights
    assert record.weights == {
        name: weight_digest(weights(name).astype(np.float32)) for name, _ in weight_shapes(CONFIG)
    }
    assert record.token_ids == [list(s.token_ids[:-1]) for s in samples]
    assert record.target_ids == [list(s.response_token_ids) for s in samples]
    assert record.positions == [list(range(s.forward_length)) for s in samples]
    assert record.rope == {"theta": 1e6, "dim": 32, "scaling": "default", "attention_factor": 1.0}
    assert record.random_state is None


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_observing_changes_no_bit_and_repeats(engine: Engine, phase: str) -> None:
    once, again = engine.capture(phase=phase), engine.capture(phase=phase)
    blind = engine.capture(phase=phase, observe=False)
    assert digests(once) == digests(again)
    assert digests(blind) == {"logprobs": digests(once)["logprobs"]}


@pytest.mark.parametrize("node", FAULTS, ids=lambda b: b.name)
def test_a_fault_changes_its_element_and_the_logprobs(node: Any, engine: Engine, honest: Trace) -> None:
    """In decode too, where a changed K or V must stay in the cache for the tokens after it."""
    fault = fault_at(node, honest)
    changed = engine.capture(phase=honest.header.phase, interventions=(fault,))
    check_fault(node, fault, honest, seen(changed))


def test_it_generates_reproducibly_what_it_then_scores_equal(engine: Engine, tmp_path: Path) -> None:
    prompts = tuple(replace(s, response_token_ids=()) for s in scored_samples(CONFIG))
    plan: dict[str, Any] = {"samples": prompts, "phase": "decode", "generate": 5, "top_p": 0.9, "top_k": 50}
    first, second = engine.run(**plan, seed=3), engine.run(**plan, seed=3)
    other = engine.run(**plan, seed=4)
    assert first.samples == second.samples != other.samples
    assert [len(s.response_token_ids) for s in first.samples] == [5] * len(LENGTHS)
    record = Trace(first.trace).header.object
    assert record.random_state == {"seed": 3} and (record.top_p, record.top_k) == (0.9, 50)
    forced = engine.capture(samples=tuple(first.samples), phase="decode")
    assert digests(forced) == digests(Trace(first.trace))


def test_scoring_needs_responses(engine: Engine, tmp_path: Path) -> None:
    prompts = tuple(replace(s, response_token_ids=()) for s in scored_samples(CONFIG))
    with pytest.raises(RlkError, match="response of length 0"):
        engine.session.capture(plan_for(CONFIG, tmp_path / "trace", samples=prompts))


def test_shifted_positions_are_really_rotated(engine: Engine, scored: Trace) -> None:
    trace = engine.capture(position_offset=3)
    assert trace.header.object.positions[0] == [p + 3 for p in scored.header.object.positions[0]]
    assert digests(trace)["layers.0.self_attn.q_rope"] != digests(scored)["layers.0.self_attn.q_rope"]
    check_meaning(seen(trace))


def test_sdpa_overrides_and_nothing_left_patched(tmp_path: Path) -> None:
    """In this process."""
    from transformers.models.qwen3 import modeling_qwen3

    from diffcheck.capture.transformers import Adapter

    functions = modeling_qwen3.ALL_ATTENTION_FUNCTIONS
    original = modeling_qwen3.apply_rotary_pos_emb, functions["sdpa"]
    flipped = "model.layers.2.self_attn.k_norm.weight"
    options = replace(
        OPTIONS,
        model_overrides={"rope_theta": 5e5, "rms_norm_eps": 1e-5},
        weight_flips=((flipped, 3, 2),),
        extra={"attn_implementation": "sdpa", "logprob": "logsumexp", "threads": 1},
    )
    engine = Adapter(options, quiet)
    trace = Trace(engine.capture(plan_for(CONFIG, tmp_path / "trace"), quiet).trace)
    assert (modeling_qwen3.apply_rotary_pos_emb, functions["sdpa"]) == original
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in engine.model.modules())
    engine.close()
    assert set(trace.header.boundaries) == {b.name for b in graph(CONFIG)}
    record = trace.header.object
    assert record.rope["theta"] == 5e5 and record.model["rms_norm_eps"] == 1e-5
    weights = seen(trace).weights
    changed = [n for n in record.weights if record.weights[n] != weight_digest(weights(n).astype(np.float32))]
    assert changed == [flipped]
    config = replace(CONFIG, rope_theta=5e5, rms_norm_eps=1e-5)
    check_meaning(replace(seen(trace), config=config))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor_parallel": 2}, "tensor parallelism"),
        ({"extra": {"attn_implementation": "flash"}}, "'flash' is not supported"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"extra": {"block_size": 16}}, "'block_size' is unknown"),
        ({"weight_flips": (("model.nonsense", 0, 0),)}, r"no weight 'model\.nonsense'"),
    ],
)
def test_bad_options_are_named(changes: dict[str, Any], named: str) -> None:
    from diffcheck.capture.transformers import Adapter

    with pytest.raises(InputError, match=named):
        Adapter(replace(OPTIONS, **changes), quiet)


@pytest.mark.parametrize("kind", ["transformers", "megatron"])
@pytest.mark.parametrize("damage", ["is missing", "safetensors"])
def test_an_incomplete_or_damaged_model_is_refused(kind: str, damage: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from diffcheck.capture.adapter import open_adapter

    pytest.importorskip("megatron.core")
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    target = tmp_path / "model.safetensors"
    weights = load_file(FOLDER / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, target)
    if damage == "safetensors":
        target.write_bytes(target.read_bytes()[:5000])
    with pytest.raises(InputError, match=damage) as caught:
        open_adapter(replace(OPTIONS, engine=kind, model=tmp_path), quiet)
    assert str(tmp_path) in caught.value.cause


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "llama-biases": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 4},
}


def other_model(folder: Path, changes: dict[str, Any]) -> ModelConfig:
    """The tiny model's sizes in another architecture, float32, random weights and biases."""
    from safetensors.torch import save_file

    settings = json.loads((FOLDER / "config.json").read_text()) | {"dtype": "float32", "num_hidden_layers": 2} | changes
    config = ModelConfig.from_dict(settings)
    generator = torch.Generator().manual_seed(11)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    weights = {n: 0.1 * torch.randn(shape, generator=generator) for n, shape in weight_shapes(config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return config


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures_mean_the_same_in_megatron(name: str, tmp_path: Path) -> None:
    """Biases, a tied head and no QK-norm, in float32: each engine against the weights, and one against the other."""
    pytest.importorskip("megatron.core")
    from diffcheck.capture.adapter import open_adapter

    config = other_model(tmp_path / "model", ARCHITECTURES[name])
    logprobs = []
    for kind in ("transformers", "megatron"):
        options = EngineOptions(kind, tmp_path / "model", dtype="float32", device=DEVICE, extra={"threads": 1})
        live = open_adapter(options, quiet)
        try:
            trace = Trace(live.capture(plan_for(config, tmp_path / kind), quiet).trace)
        finally:
            live.close()
        assert {b.name for b in graph(config)} - set(trace.header.boundaries) == {"logsumexp"}
        view = seen(trace, tmp_path / "model", config)
        check_meaning(view, FLOAT32)
        assert trace.header.object.weights.keys() == dict(weight_shapes(config)).keys()
        logprobs.append((view["logprobs"], trace.header.object.weights))
    np.testing.assert_allclose(logprobs[0][0], logprobs[1][0], atol=1e-4)
    assert logprobs[0][1] == logprobs[1][1]
