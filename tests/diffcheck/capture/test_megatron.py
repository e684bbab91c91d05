"""Real Megatron-core, tensor parallelism 1 and 2: every boundary is what it says, nothing is disturbed, faults land."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffcheck.base.boundaries import graph
from diffcheck.base.errors import EngineError, InputError, RlkError
from diffcheck.base.models import resolve_model
from diffcheck.base.record import weight_digest
from diffcheck.capture.plan import EngineOptions
from diffcheck.capture.session import EngineSession
from diffcheck.localize import localize
from diffcheck.trace.reader import Trace
from reference.models.weights import weight_shapes
from tests.diffcheck.engine_cases import (
    DEVICE,
    Seen,
    check_fault,
    check_meaning,
    digests,
    fault_at,
    plan_for,
    scored_samples,
)

pytest.importorskip("megatron.core")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engines

FOLDER, CONFIG = resolve_model("tiny-qwen3")
#: One thread: these matrices are small, and the machine may be shared.
OPTIONS = EngineOptions("megatron", FOLDER, device=DEVICE, extra={"threads": 1})
#: Faults are injected in the middle layer, so that there are boundaries before and after.
FAULTS = [b for b in graph(CONFIG) if b.layer in (1, None) and b.operator != "logsumexp"]
#: One boundary of each kind of layout: replicated, column, fused column, partial, and what the reduction gives.
TP_FAULTS = [
    b
    for b in graph(CONFIG, 2)
    if b.name.removeprefix("layers.1.")
    in (
        "embed_tokens",
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.v_cache",
        "self_attn.o_proj.partial",
        "self_attn.o_proj",
        "mlp.up_proj",
        "mlp.act",
        "processed_logits",
    )
]


def quiet(_what: str, _done: int, _total: int) -> None:
    return None


class Engine:
    """A session and the folder its traces go to."""

    def __init__(self, options: EngineOptions, out: Path) -> None:
        self.session = EngineSession(options, quiet)
        self.out = out
        self._count = 0

    def capture(self, **changes: Any) -> Trace:
        self._count += 1
        plan = plan_for(CONFIG, self.out / str(self._count), **changes)
        return Trace(self.session.capture(plan).trace)


@pytest.fixture(scope="module")
def tp1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(OPTIONS, tmp_path_factory.mktemp("tp1"))
    with engine.session:
        yield engine


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs")
    engine = Engine(replace(OPTIONS, tensor_parallel=2), tmp_path_factory.mktemp("tp2"))
    with engine.session:
        yield engine


@pytest.fixture(scope="module")
def honest(tp1: Engine) -> Trace:
    return tp1.capture()


@pytest.fixture(scope="module")
def honest_tp2(tp2: Engine) -> Trace:
    return tp2.capture()


def checkpoint(name: str) -> Any:
    from diffcheck.capture.live import Checkpoint

    return Checkpoint(FOLDER, torch.bfloat16)[name]


def seen(trace: Trace) -> Seen:
    return Seen(trace, CONFIG, lambda name: checkpoint(name).double().numpy())


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_boundary_is_observed_but_the_one_that_is_never_formed(
    ranks: int, honest: Trace, honest_tp2: Trace
) -> None:
    trace = honest if ranks == 1 else honest_tp2
    expected = {b.name for b in graph(CONFIG, ranks)}
    assert set(trace.header.boundaries) == expected - {"logsumexp"}
    assert set(trace.header.unobserved) == {"logsumexp"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_boundary_means_what_its_name_says(ranks: int, honest: Trace, honest_tp2: Trace) -> None:
    """q, k, v and gate, up are back in HF layout, K and V are the rotated and the plain ones, and so on."""
    check_meaning(seen(honest if ranks == 1 else honest_tp2))


def test_object_record_is_the_checkpoint_and_the_samples(honest: Trace, honest_tp2: Trace) -> None:
    samples = scored_samples(CONFIG)
    for trace, ranks in ((honest, 1), (honest_tp2, 2)):
        record = trace.header.object
        assert record.weights == {name: weight_digest(checkpoint(name)) for name, _ in weight_shapes(CONFIG)}
        assert record.token_ids == [list(s.token_ids[:-1]) for s in samples]
        assert record.target_ids == [list(s.response_token_ids) for s in samples]
        assert record.positions == [list(range(s.forward_length)) for s in samples]
        assert [sum(a) for a in record.active] == [len(s.response_token_ids) for s in samples]
        assert record.rope == {"theta": 1e6, "dim": 32, "scaling": "default", "attention_factor": 1.0}
        assert (record.real_vocab, record.padded_vocab) == (509, 512)
        assert record.shards["q_proj"] == ([[0, 128]] if ranks == 1 else [[0, 64], [64, 128]])


@pytest.mark.parametrize("engine", ["tp1", "tp2"])
def test_observing_changes_no_bit_and_repeats(engine: str, request: pytest.FixtureRequest) -> None:
    live: Engine = request.getfixturevalue(engine)
    once, again, blind = live.capture(), live.capture(), live.capture(observe=False)
    assert digests(once) == digests(again)
    assert digests(blind) == {"logprobs": digests(once)["logprobs"]}


@pytest.mark.parametrize("node", FAULTS, ids=lambda b: b.name)
def test_a_fault_changes_its_element_and_the_logprobs(node: Any, tp1: Engine, honest: Trace) -> None:
    fault = fault_at(node, honest)
    check_fault(node, fault, honest, seen(tp1.capture(interventions=(fault,))))


@pytest.mark.parametrize("node", TP_FAULTS, ids=lambda b: b.name)
def test_a_fault_lands_on_the_right_rank(node: Any, tp2: Engine, honest_tp2: Trace) -> None:
    fault = fault_at(node, honest_tp2)
    changed = tp2.capture(interventions=(fault,))
    assert changed.header.evidence["ranks_disagree_at"] == []
    check_fault(node, fault, honest_tp2, seen(changed))


def test_two_ranks_compute_the_same_object_as_one(honest: Trace, honest_tp2: Trace) -> None:
    """The verdict is about kernels, the values stay close, and replicated values agree on all ranks."""
    verdict = localize(honest, honest_tp2)
    assert verdict.verdict in ("equal", "diverged")
    assert honest_tp2.header.evidence["ranks_disagree_at"] == []
    assert honest_tp2.header.evidence["world_size"] == 2
    one, two = seen(honest)["logprobs"], seen(honest_tp2)["logprobs"]
    np.testing.assert_allclose(one, two, atol=0.1)


def test_a_rank_that_disagrees_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffcheck.capture.megatron import Adapter

    def exchange(everyone: list[dict[str, str]], mine: dict[str, str]) -> None:
        everyone[:] = [mine, {**mine, "norm": "other bits"}]

    monkeypatch.setattr(torch.distributed, "all_gather_object", exchange)
    rank = Adapter.__new__(Adapter)
    rank.ranks = 2
    recorder: Any = types.SimpleNamespace(digests=lambda: {"embed_tokens": "bits", "norm": "bits"})
    assert rank._agreement(recorder) == {"ranks_disagree_at": ["norm"]}


def test_temperature_divides_the_logits_in_float32(tp1: Engine, honest: Trace) -> None:
    trace = tp1.capture(temperature=0.7)
    logits = seen(trace)["logits"].astype(np.float32)
    # On CUDA torch multiplies by the reciprocal of a scalar divisor; measured on one H200 with torch 2.11.
    t = np.float32(0.7)
    scaled = logits * (np.float32(1) / t) if DEVICE == "cuda" else logits / t
    np.testing.assert_array_equal(seen(trace)["processed_logits"], scaled)
    assert digests(trace)["logits"] == digests(honest)["logits"]
    assert trace.header.object.temperature == 0.7
    check_meaning(seen(trace))


def test_shifted_positions_are_really_rotated(tp1: Engine, honest: Trace) -> None:
    trace = tp1.capture(position_offset=3)
    assert trace.header.object.positions[0] == [p + 3 for p in honest.header.object.positions[0]]
    name = "layers.0.self_attn.q_rope"
    assert digests(trace)["layers.0.self_attn.q_norm"] == digests(honest)["layers.0.self_attn.q_norm"]
    assert digests(trace)[name] != digests(honest)[name]
    check_meaning(seen(trace))


def test_layers_limit_what_is_observed(tp1: Engine, honest: Trace) -> None:
    trace = tp1.capture(layers=(1, 2), level="digest")
    layers = {b.layer for b in graph(CONFIG) if b.name in trace.header.boundaries}
    assert layers == {None, 1}
    assert digests(trace).items() <= digests(honest).items()


@pytest.mark.parametrize("engine", ["tp1", "tp2"])
def test_a_plan_it_cannot_run_is_refused_and_the_engine_lives_on(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    live: Engine = request.getfixturevalue(engine)
    samples = tuple(replace(s, response_token_ids=()) for s in scored_samples(CONFIG))
    with pytest.raises(RlkError, match="response of length 0") as caught:
        live.session.capture(plan_for(CONFIG, tmp_path / "trace", samples=samples))
    assert "generate" in caught.value.remedy and not list(tmp_path.iterdir())
    assert digests(live.capture(level="digest"))["norm"]


def test_overrides_change_the_live_object(tmp_path: Path) -> None:
    """In this process; and when the engine is closed, nothing of it is left patched."""
    from megatron.core.transformer import attention

    from diffcheck.capture.megatron import Adapter

    original = attention.apply_rotary_pos_emb, torch.cuda.current_device
    flipped = "model.layers.1.mlp.up_proj.weight"
    options = replace(
        OPTIONS,
        model_overrides={"rope_theta": 5e5},
        weight_flips=((flipped, 7, 0),),
        extra={"threads": 1, "vocab_multiple": 100, "micro_batch": 2},
    )
    engine = Adapter(options, quiet)
    try:
        trace = Trace(engine.capture(plan_for(CONFIG, tmp_path / "trace"), quiet).trace)
        assert attention.apply_rotary_pos_emb is original[0]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in engine.model.modules())
    finally:
        engine.close()
    assert torch.cuda.current_device is original[1]
    record = trace.header.object
    assert record.rope["theta"] == 5e5 and record.padded_vocab == 600
    changed = [n for n, _ in weight_shapes(CONFIG) if record.weights[n] != weight_digest(checkpoint(n))]
    assert changed == [flipped]
    assert trace.header.changed == ["model rope_theta = 500000.0", f"weight {flipped}[7]: bit 0 flipped"]
    check_meaning(replace(seen(trace), config=replace(CONFIG, rope_theta=5e5)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor_parallel": 3}, "num_attention_heads = 4 is not divisible"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"extra": {"block_size": 16}}, "'block_size' is unknown"),
        ({"model_overrides": {"hidden_size": 64}}, "'hidden_size'"),
        ({"weight_flips": (("model.nonsense", 0, 0),)}, "no weight 'model.nonsense'"),
        ({"profile": "vllm-0.32-cpu"}, "describes an engine"),
    ],
)
def test_bad_options_are_named(changes: dict[str, Any], named: str) -> None:
    from diffcheck.capture.megatron import Adapter

    with pytest.raises(InputError, match=named):
        Adapter(replace(OPTIONS, **changes), quiet)


def test_unknown_release_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffcheck.capture.megatron.adapter import _check_version

    package, core = types.ModuleType("megatron"), types.ModuleType("megatron.core")
    core.__version__, package.core = "0.12.3", core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", package)
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    with pytest.raises(EngineError, match=r"0\.12\.3 is not supported") as caught:
        _check_version()
    assert "0.16.1" in caught.value.remedy and "0.19.2" in caught.value.remedy
