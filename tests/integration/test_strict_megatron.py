"""Strict Megatron-core on a CPU: the specification's bits on one rank and on two, and gradients that can be trusted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.models import resolve_model
from diffcheck.capture.adapter import open_adapter
from diffcheck.capture.megatron.weights import parameters, to_hf
from diffcheck.capture.plan import EngineOptions
from tests.integration.strict_cases import PROFILE, Live, batch, live, quiet, same

pytest.importorskip("megatron.core")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engines

TIED = {"model": "tiny-qwen3-tied", "dtype": "float32"}
SHAPED = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Three sequences at a time, right-padded."""
    with live("megatron", tmp_path_factory.mktemp("megatron"), extra={"micro_batch": 3}) as engine:
        yield engine


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live("megatron", tmp_path_factory.mktemp("tp2"), tensor_parallel=2, **TIED) as engine:
        yield engine


@pytest.mark.parametrize("changes", [{}, {"samples": batch()[2:3]}, SHAPED], ids=["batch", "alone", "shaped"])
def test_every_boundary_has_the_bits_of_the_specification(
    changes: dict[str, Any], megatron: Live, tmp_path: Path
) -> None:
    trace = megatron.trace(**changes)
    with live("reference", tmp_path) as reference:
        same(trace, reference.trace(**changes))
    strict = trace.header.evidence["strict"]
    forwards = 3 if len(trace.header.samples) > 1 else 1
    assert strict["operators"]["rms_norm"]["calls"] == 7 * forwards and strict["fallbacks"] == 0
    assert strict["patches"][0]["target"] == "megatron.core.transformer.attention.apply_rotary_pos_emb"


def test_two_ranks_have_the_bits_of_the_specification(tp2: Live, tmp_path: Path) -> None:
    """In float32 with tied embeddings, partial sums included; the specification's do not depend on the ranks."""
    with live("reference", tmp_path, tensor_parallel=2, **TIED) as reference:
        same(tp2.trace(), reference.trace())
    assert tp2.trace().header.evidence["ranks_disagree_at"] == []


@pytest.fixture(scope="module")
def trainer() -> Iterator[Any]:
    """A strict float32 model in this process."""
    path, _ = resolve_model(TIED["model"])
    adapter = open_adapter(EngineOptions("megatron", path, dtype="float32", profile=PROFILE, max_length=128), quiet)
    yield adapter
    adapter.close()


def loss_gradients(adapter: Any, ids: list[int]) -> dict[str, Any]:
    """Gradient of the mean negative logprob at temperature 0.8, by Megatron name."""
    from integration.megatron import plugin

    model, width = adapter.model, len(ids) - 1
    model.zero_grad()
    tokens, targets = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
    mask = torch.ones(1, 1, width, width, dtype=torch.bool).triu(1)
    logits = model(tokens, torch.arange(width)[None], mask)
    vocabulary = adapter.config.vocab_size
    (-plugin.logprobs(model, logits, targets, vocabulary=vocabulary, temperature=0.8).mean()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_gradients_of_a_model_are_those_of_float64_and_the_same_bits_each_run(trainer: Any) -> None:
    """Against transformers in float64, every parameter."""
    from transformers import AutoModelForCausalLM

    ids = list(batch()[2].token_ids)
    found = loss_gradients(trainer, ids)
    again = loss_gradients(trainer, ids)
    assert all(torch.equal(found[n].view(torch.int32), again[n].view(torch.int32)) for n in found)
    path, config = resolve_model(TIED["model"])
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    logits = exact(torch.tensor([ids[:-1]])).logits[0] / 0.8
    torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).backward()
    expected = {name: parameter.grad for name, parameter in exact.named_parameters()}
    mapped = dict(to_hf(lambda name: [found[name]], config))
    assert len(mapped) == sum(len(p.hf) for p in parameters(config)) == len(expected)
    for name, gradient in mapped.items():
        error = (gradient.double() - expected[name]).norm() / expected[name].norm()
        assert error < 2e-5, f"{name}: relative error {error:.1e}"


def test_a_native_module_is_found_before_it_computes(trainer: Any) -> None:
    from integration.megatron import plugin

    layer = trainer.model.decoder.layers[1]
    strict = layer.input_layernorm
    layer.input_layernorm = torch.nn.RMSNorm(128)
    try:
        with pytest.raises(RuntimeError, match=r"decoder\.layers\.1\.input_layernorm \(RMSNorm\)"):
            plugin.begin(trainer.model)
    finally:
        layer.input_layernorm = strict
    plugin.begin(trainer.model)


def test_rope_of_other_models_in_the_process_stays_native(trainer: Any) -> None:
    from megatron.core.transformer import attention

    class Plain:
        apply_rope_fusion, rotary_interleaved, multi_latent_attention = False, False, False

    native = attention.apply_rotary_pos_emb.rlk_original
    t, freqs = torch.randn(5, 1, 2, 32), torch.randn(5, 1, 1, 32)
    arguments = {"config": Plain(), "cp_group": object()}
    assert torch.equal(attention.apply_rotary_pos_emb(t, freqs, **arguments), native(t, freqs, **arguments))


def test_a_profile_that_describes_an_engine_is_refused() -> None:
    from integration.backends.arrays import ArrayOperators

    with pytest.raises(ValueError, match="describes an engine"):
        ArrayOperators("megatron-0.16-local", torch.float32)
