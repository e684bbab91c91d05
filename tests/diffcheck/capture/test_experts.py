"""Mixtures of experts in real engines: each boundary is what it says, rows are joined by expert, changes land."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from diffcheck.base.bits import to_float32
from diffcheck.base.boundaries import graph
from diffcheck.base.errors import InputError
from diffcheck.base.models import resolve_model
from diffcheck.base.record import weight_digest
from diffcheck.capture.interventions import BitFlip
from diffcheck.capture.live import Checkpoint
from diffcheck.capture.plan import EngineOptions
from diffcheck.capture.session import EngineSession
from diffcheck.localize import localize
from diffcheck.trace.reader import Trace
from reference.models.weights import weight_shapes
from reference.operators import MoeCombineContract, moe_combine
from tests.diffcheck.engine_cases import Seen, check_meaning, plan_for

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engines

Capture = Callable[..., Trace]
NAMES = ("tiny-qwen3-moe", "tiny-qwen3-moe-unnormed")
#: What each engine does not show, by the end of the name.
HIDDEN = {
    "reference": (),
    "transformers": ("logsumexp",),
    "megatron": ("logsumexp", ".scores", ".down_proj"),
    "vllm": ("logsumexp", ".scores", ".input", "experts."),
}


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Capture]:
    """Traces of an engine that is started once a model."""
    out, sessions = tmp_path_factory.mktemp("experts"), dict[tuple[str, str], EngineSession]()
    count = iter(range(1000))
    with ExitStack() as stack:

        def capture(engine: str, name: str, **changes: Any) -> Trace:
            pytest.importorskip({"megatron": "megatron.core", "reference": "numpy"}.get(engine, engine))
            folder, config = resolve_model(name)
            if (engine, name) not in sessions:
                extra = {"threads": 1} if engine in ("transformers", "megatron") else {}
                options = EngineOptions(engine, folder, max_length=64, extra=extra)
                sessions[engine, name] = stack.enter_context(EngineSession(options, lambda *_: None))
            plan = plan_for(config, out / str(next(count)), **changes)
            return Trace(sessions[engine, name].capture(plan).trace)

        yield capture


def seen(trace: Trace, name: str) -> Seen:
    folder, config = resolve_model(name)
    weights = Checkpoint(folder, torch.bfloat16)
    return Seen(trace, config, lambda x: weights[x].double().numpy())


@pytest.mark.parametrize(
    ("engine", "name"),
    [*((e, n) for e in ("reference", "transformers", "megatron") for n in NAMES), ("vllm", NAMES[0])],
)
def test_every_boundary_means_what_its_name_says(engine: str, name: str, captures: Capture) -> None:
    trace = captures(engine, name, phase="decode" if engine == "vllm" else "prefill")
    view = seen(trace, name)
    check_meaning(view)
    hidden = {
        b.name
        for b in graph(view.config)
        if b.name.endswith(HIDDEN[engine]) or (engine == "vllm" and ".experts." in b.name)
    }
    if engine == "megatron":
        hidden -= {b for b in hidden if b.endswith(".scores") and name == NAMES[1]}
        hidden -= {"layers.1.mlp.down_proj"}
    assert set(trace.header.unobserved) == hidden
    assert trace.header.object.weights == {
        x: weight_digest(view.weights(x).astype(np.float32)) for x, _ in weight_shapes(view.config)
    }


def test_decode_joins_the_same_rows_by_expert_as_prefill(captures: Capture) -> None:
    """Other tokens share an expert in each step: the reference has the same bits in every boundary all the same."""
    a, b = (captures("reference", NAMES[0], phase=phase) for phase in ("prefill", "decode"))
    assert {n: e.sha256 for n, e in a.header.boundaries.items()} == {
        n: e.sha256 for n, e in b.header.boundaries.items()
    }


def test_transformers_sums_experts_upwards_in_bfloat16(captures: Capture) -> None:
    """In bits, by the contract that says so; and not by one that rounds less."""
    trace, config = captures("transformers", NAMES[0]), resolve_model(NAMES[0])[1]

    def values(part: str) -> Any:
        name = f"layers.0.mlp.{part}"
        return to_float32(trace.values(name), trace.entry(name).dtype)

    experts = values("topk_experts").astype(np.int64)
    every = np.stack([values(f"experts.{e}.down_proj") for e in range(config.num_experts)], axis=1)
    outputs = np.take_along_axis(every, experts[:, :, None], axis=1)
    weights = np.take_along_axis(values("topk_weights"), experts, axis=1)
    exact = MoeCombineContract().replace({"primitives.accumulate": "mul_add", "rounding.product": "bfloat16"})
    assert np.array_equal(moe_combine(outputs, weights, experts, exact), values("combine"))
    assert not np.array_equal(moe_combine(outputs, weights, experts, MoeCombineContract()), values("combine"))


@pytest.mark.parametrize(
    ("engine", "part"),
    [
        ("transformers", "gate"),
        ("transformers", "experts.{e}.act"),
        ("transformers", "experts.{e}.down_proj"),
        ("megatron", "gate"),
        ("megatron", "experts.{e}.input"),
        ("megatron", "experts.{e}.act"),
    ],
)
def test_a_change_is_found_where_it_was_made(engine: str, part: str, captures: Capture) -> None:
    honest = captures(engine, NAMES[0])
    row = 8 + 5  # position 5 of sample 1: sample 0 has 8 rows
    chosen = int(to_float32(honest.values("layers.0.mlp.topk_experts"), "float32")[row, 0])
    name = f"layers.0.mlp.{part.format(e=chosen)}"
    # A logit matters where its expert is chosen.
    fault = BitFlip(name, 1, 5, chosen if part == "gate" else 3, bit=9)
    changed = captures(engine, NAMES[0], interventions=(fault,))
    assert np.flatnonzero((honest.values(name) != changed.values(name)).any(axis=1)).tolist() == [row]
    first = localize(honest, changed).first_divergence
    assert first is not None and (first.boundary, first.sample, first.position) == (name, 1, 5)
    moved = (honest.values("layers.0.mlp.combine") != changed.values("layers.0.mlp.combine")).any(axis=1)
    assert np.flatnonzero(moved).tolist() == [row]


def test_routing_says_where_inputs_and_decisions_first_differ(captures: Capture) -> None:
    honest = captures("reference", NAMES[0])
    assert [(x.tokens, x.agreeing) for x in localize(honest, honest).routing] == [(len_of(honest), len_of(honest))] * 2
    logits = to_float32(honest.values("layers.0.mlp.gate"), honest.entry("layers.0.mlp.gate").dtype)
    # The sign of the largest logit of one token: its expert is the last choice now.
    flip = BitFlip("layers.0.mlp.gate", 1, 5, int(np.argmax(np.abs(logits[13]))), bit=15)
    verdict = localize(honest, captures("reference", NAMES[0], interventions=(flip,)))
    first = verdict.routing[0]
    assert (first.inputs_differing, first.tokens - first.agreeing, first.differing_on_equal_inputs) == (0, 1, 1)
    assert any("a decision first differs in layer 0, 1 of them on equal inputs" in note for note in verdict.notes)


def len_of(trace: Trace) -> int:
    return int(trace.entry("layers.0.mlp.gate").shape[0])


@pytest.mark.parametrize("engine", ["vllm", "megatron"])
def test_what_is_not_done_for_experts_is_refused(engine: str) -> None:
    from diffcheck.live_model.experts import check_experts

    check_experts(resolve_model(NAMES[0])[1], engine, 1)
    with pytest.raises(InputError, match="is not observed"):
        check_experts(resolve_model(NAMES[0])[1], engine, 2)
