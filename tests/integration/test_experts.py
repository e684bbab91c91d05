"""Strict mixtures of experts in real engines on a CPU: the specification's bits, and routers that agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from diffcheck.base.bits import to_float32
from diffcheck.base.models import resolve_model
from diffcheck.capture.interventions import BitFlip
from diffcheck.capture.plan import EngineOptions
from diffcheck.localize import localize
from reference.contract.profiles import profile
from reference.models.contracts import resolve_contracts
from tests.integration.strict_cases import LENGTHS, PROFILE, Live, live, quiet, same

torch = pytest.importorskip("torch")
MODELS = (("tiny-qwen3-moe", "bfloat16"), ("tiny-qwen3-moe-unnormed", "float32"))
Start = Callable[[str, str, str], Live]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """A live engine of a model in a dtype, started once."""
    running: dict[tuple[str, str, str], Live] = {}
    with ExitStack() as stack:

        def engine(name: str, model: str, dtype: str) -> Live:
            pytest.importorskip({"megatron": "megatron.core", "reference": "numpy"}.get(name, name))
            key = name, model, dtype
            if key not in running:
                extra = {"extra": {"micro_batch": 3}} if name == "megatron" else {}
                folder = tmp_path_factory.mktemp("-".join(key))
                running[key] = stack.enter_context(live(name, folder, model=model, dtype=dtype, **extra))
            return running[key]

        yield engine


@pytest.mark.engines
@pytest.mark.parametrize(("model", "dtype"), MODELS)
@pytest.mark.parametrize("engine", ["vllm", "megatron"])
def test_every_boundary_has_the_bits_of_the_specification(engine: str, model: str, dtype: str, start: Start) -> None:
    """Those inside an expert too, and in steps where it is given other rows together."""
    trace, reference = start(engine, model, dtype).trace(), start("reference", model, dtype).trace()
    verdict = same(trace, reference)
    assert len(verdict.boundaries) == 145 and "layers.2.mlp.experts.7.act" in {b.name for b in verdict.boundaries}
    assert [(x.layer, x.tokens - x.agreeing) for x in verdict.routing] == [(0, 0), (2, 0)]
    operators = trace.header.evidence["strict"]["operators"]
    config = resolve_model(model)[1]
    contracts = resolve_contracts(config, profile(PROFILE), dtype, {})
    for operator, site in (("moe_router", "scores"), ("moe_combine", "combine")):
        assert operators[operator]["contract_id"] == contracts[f"layers.0.mlp.{site}"].contract_id
    assert operators["moe_combine"]["calls"] == operators["moe_router"]["calls"] > 0


@pytest.mark.engines
def test_prefill_in_vllm_is_megatrons_forward(start: Start) -> None:
    same(start("vllm", *MODELS[0]).trace(phase="prefill"), start("megatron", *MODELS[0]).trace(phase="prefill"))


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["vllm", "megatron"])
@pytest.mark.parametrize(
    "part", ["gate", "scores", "topk_weights", "experts.{e}.input", "experts.{e}.down_proj", "combine"]
)
def test_a_change_is_found_where_it_was_made(engine: str, part: str, start: Start) -> None:
    side = start(engine, *MODELS[0])
    honest = side.trace()
    row = sum(LENGTHS[0]) - 1 + 5  # position 5 of sample 1; the last token of a sequence is never fed
    e = int(to_float32(honest.values("layers.0.mlp.topk_experts"), "float32")[row, 0])
    name = f"layers.0.mlp.{part.format(e=e)}"
    fault = BitFlip(name, 1, 5, e if part in ("gate", "scores", "topk_weights") else 3, bit=9)
    changed = side.trace(interventions=(fault,))
    first = localize(honest, changed).first_divergence
    assert first is not None and (first.boundary, first.sample, first.position) == (name, 1, 5)


@pytest.mark.engines
def test_gradients_are_refused_by_name() -> None:
    pytest.importorskip("megatron.core")
    from diffcheck.capture.adapter import open_adapter

    path, _ = resolve_model(MODELS[0][0])
    adapter = open_adapter(EngineOptions("megatron", path, profile=PROFILE, max_length=128), quiet)
    try:
        ids = torch.arange(5, 12)[None]
        mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).triu(1)
        with pytest.raises(TypeError, match="gradients of a mixture of experts have no strict contract yet"):
            adapter.model(ids, torch.arange(7)[None], mask)
    finally:
        adapter.close()
