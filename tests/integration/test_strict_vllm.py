"""Strict vLLM on a CPU: whatever the scheduler, the cache and the ranks do, each boundary has the specification's bits.

Every trace is compared with the reference's of the same samples, so that the ways to compute them are equal to each
other too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffcheck.capture.plan import EngineOptions
from diffcheck.capture.strict import strict_path
from diffcheck.trace.reader import Trace
from integration.versions import Patch, UnknownVersionError, apply_patches, check_version
from tests.integration.strict_cases import PROFILE, Live, batch, live, same

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

TIED = {"model": "tiny-qwen3-tied", "dtype": "float32"}
#: Too few tokens a step for the prompts, too few cache blocks for the responses, blocks of 16, and a prefix cache.
CROWDED = {
    "block_size": 16,
    "num_gpu_blocks_override": 9,
    "max_num_batched_tokens": 24,
    "enable_prefix_caching": True,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live("reference", tmp_path_factory.mktemp("reference")) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference_tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live("reference", tmp_path_factory.mktemp("reference"), **TIED) as engine:
        yield engine


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Blocks of 32 and whole prompts."""
    with live("vllm", tmp_path_factory.mktemp("vllm"), extra={"block_size": 32}) as engine:
        yield engine


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live("vllm", tmp_path_factory.mktemp("crowded"), extra=CROWDED, **TIED) as engine:
        yield engine


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live("vllm", tmp_path_factory.mktemp("tp2"), tensor_parallel=2) as engine:
        yield engine


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "decode"},
        {"phase": "prefill"},
        {"samples": batch()[2:3]},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    ],
    ids=["decode", "prefill", "batch of 1", "temperature", "top-k and top-p"],
)
def test_every_boundary_has_the_bits_of_the_specification(
    changes: dict[str, object], vllm: Live, reference: Live
) -> None:
    trace = vllm.trace(**changes)
    same(trace, reference.trace(**changes))
    if not changes.get("samples"):
        assert trace.header.evidence["scheduler"]["max_requests_in_step"] == 8


def test_blocks_chunks_and_preemption_change_no_bit(crowded: Live, reference_tied: Live) -> None:
    """In float32 with tied embeddings; requests are thrown out of the cache and computed again."""
    trace = crowded.trace()
    facts = trace.header.evidence["scheduler"]
    assert facts["prefill_chunks"] > 0 and facts["mixed_steps"] > 0 and facts["preemptions"] > 0
    assert trace.header.evidence["block_size"] == 16
    same(trace, reference_tied.trace())


def test_a_request_computed_again_from_its_first_token_has_the_same_bits(reference_tied: Live, tmp_path: Path) -> None:
    """Without a prefix cache, what preemption threw away is computed anew: the response's tokens as a prompt's."""
    with live("vllm", tmp_path, extra={**CROWDED, "enable_prefix_caching": False}, **TIED) as engine:
        trace = engine.trace()
    facts = trace.header.evidence["scheduler"]
    assert facts["preemptions"] > 0 and facts["recomputed_tokens"] > 0 and facts["prefix_cached_tokens"] == 0
    same(trace, reference_tied.trace())


def test_a_prefix_cache_hit_changes_no_bit(crowded: Live, reference_tied: Live) -> None:
    """Rows that the cache spares are all that is not seen; keys and values of those rows are."""
    samples = batch()[2:3] + batch()[7:8]
    trace = crowded.trace(samples=samples)
    assert trace.header.evidence["scheduler"]["prefix_cached_tokens"] > 0
    spared = [name for name, why in trace.header.unobserved.items() if "prefix cache" in why]
    assert "layers.0.self_attn.k_cache" not in spared and "logits" not in spared
    same(trace, reference_tied.trace(samples=samples), unobserved=tuple(spared))


def test_chunked_prefill_is_prefill(crowded: Live, reference_tied: Live) -> None:
    trace = crowded.trace(phase="prefill")
    assert trace.header.evidence["scheduler"]["prefill_chunks"] > 0
    same(trace, reference_tied.trace(phase="prefill"))


def test_two_ranks_give_the_bits_of_one(tp2: Live, vllm: Live, tmp_path: Path) -> None:
    """Partial sums are those of the reference's virtual ranks, and everything else is as with one rank."""
    same(tp2.trace(), vllm.trace())
    with live("reference", tmp_path, tensor_parallel=2) as virtual:
        same(tp2.trace(), virtual.trace())


def test_evidence_names_operators_counts_and_contracts(vllm: Live, tp2: Live) -> None:
    def strict(trace: Trace) -> dict[str, dict[str, object]]:
        found = trace.header.evidence["strict"]
        assert found["fallbacks"] == 0 and found["profile"] == "strict-v1/fma32-seq"
        return dict(found["operators"])

    trace = vllm.trace()
    steps = trace.header.evidence["scheduler"]["steps"]
    operators = strict(trace)
    assert operators["rms_norm"]["calls"] == 7 * steps and operators["row_linear"]["calls"] == 6 * steps
    assert all(len(str(entry["contract_id"])) == 64 for entry in operators.values())
    assert "all_reduce" not in operators and strict(tp2.trace())["all_reduce"]["calls"] == 6 * steps
    assert trace.header.evidence["attention_backend"].endswith("StrictAttentionImpl")
    patch, experts = trace.header.evidence["strict"]["patches"]
    assert experts["target"] == "vllm.model_executor.models.qwen3_moe.Qwen3MoeSparseMoeBlock"
    assert patch["target"] == "vllm.v1.worker.gpu_model_runner.Sampler" and patch["versions"] == ["0.32", "0.22"]


def test_without_a_profile_nothing_of_vllm_is_replaced() -> None:
    """Off means off: vLLM loads the plugin and is left as it was."""
    code = (
        "import sys\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.model_executor.custom_op import op_registry_oot\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "from vllm.v1.worker import gpu_model_runner\n"
        "assert 'integration.vllm.plugin' in sys.modules, 'the plugin was not loaded at all'\n"
        "assert not op_registry_oot and not AttentionBackendEnum.CPU_ATTN.is_overridden()\n"
        "assert gpu_model_runner.Sampler.__module__ == 'vllm.v1.sample.sampler'\n"
        "assert not [m for m in sys.modules if m.startswith('reference')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_capture_without_a_profile_is_native_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from integration.vllm.state import PROFILE as VARIABLE

    monkeypatch.setenv(VARIABLE, PROFILE)
    assert strict_path(EngineOptions("vllm", Path("model"))) is None
    assert VARIABLE not in os.environ


def test_a_runner_that_would_sample_natively_is_refused() -> None:
    environment = {**os.environ, "RLK_PROFILE": PROFILE, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    code = "from integration.vllm.plugin import register; register()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode and "that model runner has a sampler of its own" in done.stderr


def test_too_few_calls_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from integration.backends.arrays import ArrayOperators
    from integration.vllm import plugin, state

    own = ArrayOperators("strict-v1/fma32-seq", torch.float32)
    monkeypatch.setattr(state, "_operators", own)
    names = ("embedding", "rms_norm", "linear", "rope", "kv_cache", "row_linear", "residual_add", "swiglu", "attention")
    own.calls.update(dict.fromkeys(names, 100))
    assert plugin.evidence(layers=3, steps=10)["fallbacks"] == 0
    own.calls["swiglu"] = 29
    with pytest.raises(RuntimeError, match="swiglu ran 29 times in 10 forwards of 3 layers, not 30"):
        plugin.evidence(layers=3, steps=10)


def test_unknown_releases_are_refused_and_nothing_is_patched() -> None:
    with pytest.raises(UnknownVersionError, match=r"made for 0\.32\.x, found 0\.41\.0: install one of"):
        check_version("vLLM", "0.41.0", ("0.32",))
    import json

    patches = [Patch("json", name, ("1.0",), "a test", lambda original: lambda: original) for name in ("dumps", "gone")]
    with pytest.raises(UnknownVersionError, match=r"has no json\.gone"):
        apply_patches("json", "1.0.0", patches)
    assert json.dumps(1) == "1"
