"""Real vLLM: continuous batching, teacher forcing, the paged cache, tensor parallelism; nothing is disturbed, faults
land.
"""

from __future__ import annotations

import importlib.metadata
import json
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
from diffcheck.base.samples import Sample
from diffcheck.base.serving import describe_error
from diffcheck.base.workers import told_error
from diffcheck.capture.live import Checkpoint
from diffcheck.capture.plan import EngineOptions
from diffcheck.capture.session import EngineSession
from diffcheck.localize import localize
from diffcheck.trace.reader import Trace
from reference.models.config import ModelConfig
from reference.models.weights import weight_shapes
from tests.diffcheck.engine_cases import (
    DEVICE,
    FLOAT32,
    LENGTHS,
    POSITION,
    Seen,
    check_fault,
    check_meaning,
    digests,
    fault_at,
    plan_for,
    scored_samples,
)

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engines

FOLDER, CONFIG = resolve_model("tiny-qwen3")
OPTIONS = EngineOptions("vllm", FOLDER, device=DEVICE, max_length=96)
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="a limit of vLLM on a CPU")
two_ranks = pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
#: Faults are injected in the middle layer, so that there are boundaries before and after.
FAULTS = [b for b in graph(CONFIG) if b.layer in (1, None) and b.operator != "logsumexp"]
#: One boundary of each kind of layout: replicated, column, fused column, cache, partial, and what the reduction gives.
TP_FAULTS = (
    "embed_tokens",
    "layers.1.self_attn.q_proj",
    "layers.1.self_attn.v_cache",
    "layers.1.self_attn.o_proj.partial",
    "layers.1.mlp.up_proj",
    "logits",
)
#: Prompt and response lengths of a real batch: none alike, prompts of more than one block, one response of one token.
BATCH = ((5, 30), (17, 24), (40, 20), (9, 16), (26, 1), (3, 28))
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": True,
    "tie_word_embeddings": True,
}


def quiet(_what: str, _done: int, _total: int) -> None:
    return None


def batch(lengths: tuple[tuple[int, int], ...] = BATCH, seed: int = 11) -> tuple[Sample, ...]:
    rng = np.random.default_rng(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(3, CONFIG.vocab_size, n))

    return tuple(Sample(ids(prompt), ids(response)) for prompt, response in lengths)


def tiny_model(folder: Path, **changes: Any) -> tuple[Path, ModelConfig]:
    """A model folder like tiny-qwen3 with another config, weights from a seed."""
    from safetensors.torch import save_file

    data = {**json.loads((FOLDER / "config.json").read_text()), "num_hidden_layers": 2, **changes}
    rng = np.random.default_rng(1)
    config = ModelConfig.from_dict(data)
    tensors = {}
    for name, shape in weight_shapes(config):
        noise = 0.1 * rng.standard_normal(shape, np.float32)
        tensors[name] = torch.from_numpy(noise + 1 if name.endswith("norm.weight") else noise).bfloat16()
    (folder / "config.json").write_text(json.dumps(data))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, config


class Engine:
    """A session, the model it runs, and the folder its traces go to."""

    def __init__(self, options: EngineOptions, out: Path, config: ModelConfig = CONFIG) -> None:
        self.session = EngineSession(options, quiet)
        self.options, self.out, self.config = options, out, config
        self._count = 0

    def capture(self, **changes: Any) -> Trace:
        self._count += 1
        plan = plan_for(self.config, self.out / str(self._count), **{"phase": "decode", **changes})
        result = self.session.capture(plan)
        trace = Trace(result.trace)
        assert result.samples == [Sample.from_json(s) for s in trace.header.samples]
        return trace

    def seen(self, trace: Trace) -> Seen:
        weights = Checkpoint(self.options.model, getattr(torch, self.options.dtype), self.options.weight_flips)
        return Seen(trace, self.config, lambda name: weights[name].double().numpy(), bias_on_first_rank=True)


def live_engine(tmp_path_factory: pytest.TempPathFactory, **changes: Any) -> Iterator[Engine]:
    config = changes.pop("config", CONFIG)
    engine = Engine(replace(OPTIONS, **changes), tmp_path_factory.mktemp("engine"), config)
    with engine.session:
        yield engine


@pytest.fixture(scope="module")
def tp1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from live_engine(tmp_path_factory)


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from live_engine(tmp_path_factory, tensor_parallel=2)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A Llama with biases and a tied head; too few tokens a step for its prompts, too few cache blocks for its
    responses, and a prefix cache.
    """
    folder, config = tiny_model(tmp_path_factory.mktemp("llama"), **LLAMA)
    extra = {
        "block_size": 32,
        "num_gpu_blocks_override": 6,
        "max_num_batched_tokens": 24,
        "enable_prefix_caching": True,
    }
    yield from live_engine(tmp_path_factory, model=folder, config=config, extra=extra)


@pytest.fixture(scope="module")
def honest(tp1: Engine) -> Trace:
    return tp1.capture()


@pytest.fixture(scope="module")
def honest_tp2(tp2: Engine) -> Trace:
    return tp2.capture()


def scheduler(trace: Trace) -> dict[str, int]:
    facts: dict[str, int] = trace.header.evidence["scheduler"]
    return facts


def answered(trace: Trace) -> list[tuple[float, ...]]:
    return [tuple(s["rollout_logprobs"]) for s in trace.header.samples]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_boundary_of_a_real_batch_means_what_its_name_says(phase: str, tp1: Engine) -> None:
    """Six requests of different lengths in flight: rows belong where the scheduler says, K and V are read from the
    cache, and the trace's logprobs are the floats in the engine's answer.
    """
    trace = tp1.capture(samples=batch(), phase=phase)
    assert set(trace.header.boundaries) == {b.name for b in graph(CONFIG)} - {"logsumexp"}
    assert set(trace.header.unobserved) == {"logsumexp"}
    facts = scheduler(trace)
    if phase == "decode":
        assert facts["max_decoding_in_step"] >= 4 and facts["steps"] >= 30
    else:
        assert facts["max_decoding_in_step"] == 0
    check_meaning(tp1.seen(trace))
    logprobs = np.concatenate([np.array(x, np.float32) for x in answered(trace)])
    np.testing.assert_array_equal(trace.values("logprobs")[:, 0], logprobs.view(np.uint32))


def test_teacher_forcing_decodes_the_recorded_tokens_and_disturbs_nothing(tp1: Engine) -> None:
    """Tokens the engine drew itself, forced on it again, give the same bits everywhere: only draws are changed."""
    prompts = tuple(replace(s, response_token_ids=()) for s in batch())
    drawn = tp1.capture(samples=prompts, generate=12, seed=3)
    written = tuple(Sample.from_json(s) for s in drawn.header.samples)
    assert [len(s.response_token_ids) for s in written] == [12] * len(written)
    assert drawn.header.object.random_state is not None and drawn.header.object.random_state["seed"] == 3
    forced = tp1.capture(samples=tuple(replace(s, rollout_logprobs=None) for s in written))
    assert digests(forced) == digests(drawn)
    assert forced.header.object.random_state is None
    assert forced.header.object.target_ids == [list(s.response_token_ids) for s in written]
    other = tp1.capture(samples=prompts, generate=12, seed=4)
    assert other.header.object.target_ids != forced.header.object.target_ids


def test_given_and_open_responses_mix_in_one_batch(tp1: Engine) -> None:
    mixed = tuple(replace(s, response_token_ids=()) if i % 2 else s for i, s in enumerate(batch()))
    trace = tp1.capture(samples=mixed, generate=5)
    for before, after in zip(mixed, trace.header.samples, strict=True):
        if before.response_token_ids:
            assert tuple(after["response_token_ids"]) == before.response_token_ids
        else:
            assert len(after["response_token_ids"]) == 5


def test_more_requests_than_seats_join_while_others_decode(tp1: Engine) -> None:
    lengths = tuple((3 + n, 2 + 3 * (n % 5)) for n in range(12))
    trace = tp1.capture(samples=batch(lengths))
    assert scheduler(trace)["max_requests_in_step"] == 8 and scheduler(trace)["mixed_steps"] > 0
    check_meaning(tp1.seen(trace))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_chunked_prefill_and_preemption_are_attributed(phase: str, crowded: Engine) -> None:
    trace = crowded.capture(samples=batch(), phase=phase)
    facts = scheduler(trace)
    assert facts["prefill_chunks"] > 0
    if phase == "decode":
        assert facts["mixed_steps"] > 0 and facts["preemptions"] > 0 and facts["recomputed_tokens"] > 0
    assert set(trace.header.boundaries) == {b.name for b in graph(crowded.config)} - {"logsumexp"}
    check_meaning(crowded.seen(trace))
    weights = Checkpoint(crowded.options.model, torch.bfloat16)
    assert trace.header.object.weights == {name: weight_digest(weights[name]) for name in weights}
    lengths = [len(ids) for ids in trace.header.object.token_ids]
    assert trace.header.object.kv.logical(lengths) == [f"0..{n - 1} once" for n in lengths]


def test_prefix_cached_rows_show_the_cache_and_name_the_reason(crowded: Engine) -> None:
    first, second = batch(((40, 4), (45, 4)))
    shared = replace(second, prompt_token_ids=first.prompt_token_ids[:36] + second.prompt_token_ids[36:])
    trace = crowded.capture(samples=(first, shared))
    assert scheduler(trace)["prefix_cached_tokens"] == 32
    assert trace.header.object.token_ids == [list(s.token_ids[:-1]) for s in (first, shared)]
    assert trace.header.object.positions == [list(range(43)), list(range(48))]
    slots = trace.header.object.kv.slots
    assert slots[0][:32] == slots[1][:32] and not set(slots[0][32:]) & set(slots[1][32:])
    for n in range(crowded.config.num_hidden_layers):
        for which in ("k_cache", "v_cache"):
            bits = trace.values(f"layers.{n}.self_attn.{which}")
            np.testing.assert_array_equal(bits[:32], bits[43 : 43 + 32])
    assert trace.header.unobserved["layers.0.self_attn.q_proj"] == (
        "row (sample 1, position 0) was not computed: its K and V were in the prefix cache"
    )
    assert {"logits", "logprobs"} <= set(trace.header.boundaries)
    again = crowded.capture(samples=(first, shared))
    assert digests(again) == digests(trace) and scheduler(again) == scheduler(trace)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("engine", ["tp1", pytest.param("tp2", marks=two_ranks)])
def test_observing_changes_no_bit_and_repeats(engine: str, phase: str, request: pytest.FixtureRequest) -> None:
    live: Engine = request.getfixturevalue(engine)
    once, again = live.capture(phase=phase), live.capture(phase=phase)
    blind = live.capture(phase=phase, observe=False)
    assert digests(once) == digests(again)
    assert digests(blind) == {"logprobs": digests(once)["logprobs"]}
    assert answered(blind) == answered(once) == answered(again)
    left, right = (t.header.object.to_json() for t in (once, again))
    assert {**left, "kv": None} == {**right, "kv": None}


@pytest.mark.parametrize("node", FAULTS, ids=lambda b: b.name)
def test_a_fault_changes_its_element_and_the_logprobs(node: Any, tp1: Engine, honest: Trace) -> None:
    fault = fault_at(node, honest)
    changed = tp1.capture(interventions=(fault,))
    check_fault(node, fault, honest, tp1.seen(changed))
    # The engine's own answer moves too, not only what was observed of it.
    token = POSITION - (LENGTHS[fault.sample][0] - 1)
    assert answered(changed)[fault.sample][token] != answered(honest)[fault.sample][token]


@two_ranks
@pytest.mark.parametrize("name", TP_FAULTS)
def test_a_fault_lands_on_the_right_rank(name: str, tp2: Engine, honest_tp2: Trace) -> None:
    (node,) = (b for b in graph(CONFIG, 2) if b.name == name)
    fault = fault_at(node, honest_tp2)
    check_fault(node, fault, honest_tp2, tp2.seen(tp2.capture(interventions=(fault,))))


@two_ranks
def test_two_ranks_compute_the_same_object_as_one(tp2: Engine, honest: Trace, honest_tp2: Trace) -> None:
    assert set(honest_tp2.header.boundaries) == {b.name for b in graph(CONFIG, 2)} - {"logsumexp"}
    check_meaning(tp2.seen(honest_tp2))
    assert honest_tp2.header.object.weights == honest.header.object.weights
    assert honest_tp2.header.object.shards["q_proj"] == [[0, 64], [64, 128]]
    assert localize(honest, honest_tp2).verdict in ("equal", "diverged")
    partial = honest_tp2.values("layers.1.mlp.down_proj.partial")
    assert partial.shape[1] == 2 * CONFIG.hidden_size


def test_object_record_is_the_checkpoint_and_the_samples(tp1: Engine, honest: Trace) -> None:
    samples, record = scored_samples(CONFIG), honest.header.object
    checkpoint = Checkpoint(FOLDER, torch.bfloat16)
    assert record.weights == {name: weight_digest(checkpoint[name]) for name, _ in weight_shapes(CONFIG)}
    assert record.token_ids == [list(s.token_ids[:-1]) for s in samples]
    assert record.target_ids == [list(s.response_token_ids) for s in samples]
    assert record.positions == [list(range(s.forward_length)) for s in samples]
    assert [sum(a) for a in record.active] == [len(s.response_token_ids) for s in samples]
    assert record.rope == {"theta": 1e6, "dim": 32, "scaling": "default", "attention_factor": 1.0}
    assert (record.real_vocab, record.padded_vocab) == (509, 512)
    assert record.kv.layout == "paged" and record.kv.block_size == honest.header.evidence["block_size"]
    lengths = [len(ids) for ids in record.token_ids]
    assert record.kv.logical(lengths) == [f"0..{n - 1} once" for n in lengths]
    assert record.random_state is None


def test_temperature_and_filters_shape_the_processed_logits(tp1: Engine, honest: Trace) -> None:
    """The engine's processed logprobs, while the recorded tokens are forced."""
    trace = tp1.capture(temperature=0.7)
    seen = tp1.seen(trace)
    np.testing.assert_array_equal(seen["processed_logits"], seen["logits"].astype(np.float32) / np.float32(0.7))
    assert digests(trace)["logits"] == digests(honest)["logits"]
    assert trace.header.object.temperature == 0.7
    check_meaning(seen)
    kept = tp1.capture(top_k=5)
    counts = np.isfinite(tp1.seen(kept)["processed_logits"]).sum(axis=1)
    assert counts.max() <= 8 and counts.min() >= 5 and kept.header.object.top_k == 5


def test_shifted_positions_are_really_rotated(tp1: Engine, honest: Trace) -> None:
    trace = tp1.capture(position_offset=3)
    assert trace.header.object.positions[0] == [p + 3 for p in honest.header.object.positions[0]]
    assert digests(trace)["layers.0.self_attn.q_norm"] == digests(honest)["layers.0.self_attn.q_norm"]
    assert digests(trace)["layers.0.self_attn.q_rope"] != digests(honest)["layers.0.self_attn.q_rope"]
    check_meaning(tp1.seen(trace))


def test_layers_limit_what_is_observed(tp1: Engine, honest: Trace) -> None:
    trace = tp1.capture(layers=(1, 2), level="digest")
    assert {b.layer for b in graph(CONFIG) if b.name in trace.header.boundaries} == {None, 1}
    assert digests(trace).items() <= digests(honest).items()


def test_qwen2_with_changed_theta_and_weight(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Biases on q, k, v, no QK-norm; float32; what was changed on purpose is live and in the record."""
    folder, config = tiny_model(
        tmp_path_factory.mktemp("qwen2"), architectures=["Qwen2ForCausalLM"], model_type="qwen2"
    )
    flipped = "model.layers.1.mlp.up_proj.weight"
    overrides = {"rope_theta": 5e5}
    for engine in live_engine(
        tmp_path_factory,
        model=folder,
        config=replace(config, rope_theta=5e5),
        dtype="float32",
        model_overrides=overrides,
        weight_flips=((flipped, 7, 20),),
    ):
        trace = engine.capture()
        assert set(trace.header.boundaries) == {b.name for b in graph(config)} - {"logsumexp"}
        check_meaning(engine.seen(trace), FLOAT32)
        record = trace.header.object
        assert record.rope["theta"] == record.model["rope_theta"] == 5e5
        plain = Checkpoint(folder, torch.float32)
        assert [n for n in plain if record.weights[n] != weight_digest(plain[n])] == [flipped]
        assert trace.header.changed == ["model rope_theta = 500000.0", f"weight {flipped}[7]: bit 20 flipped"]


@two_ranks
@pytest.mark.exhaustive
def test_llama_with_biases_tied_head_and_one_key_value_head_on_two_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """K and V are whole on both ranks; a fault in them lands once, in the caches of both."""
    folder, config = tiny_model(tmp_path_factory.mktemp("llama"), **LLAMA, num_key_value_heads=1)
    for engine in live_engine(tmp_path_factory, model=folder, config=config, tensor_parallel=2):
        trace = engine.capture()
        assert set(trace.header.boundaries) == {b.name for b in graph(config, 2)} - {"logsumexp"}
        check_meaning(engine.seen(trace))
        plain = Checkpoint(folder, torch.bfloat16)
        assert trace.header.object.weights == {n: weight_digest(plain[n]) for n in plain}
        (node,) = (b for b in graph(config, 2) if b.name == "layers.1.self_attn.v_cache")
        fault = fault_at(node, trace)
        check_fault(node, fault, trace, engine.seen(engine.capture(interventions=(fault,))))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"phase": "prefill", "temperature": 0.7}, "prompt logprobs ignore temperature"),
        ({"temperature": 0.0}, "temperature 0.0 is not positive"),
        ({"position_offset": 500}, "leaves the RoPE table"),
        ({"generate": 90, "samples": (Sample((5, 6, 7, 8, 9, 10, 11)),)}, "97 tokens exceed the limit of 96"),
        ({"samples": (Sample((5, 509), (7,)),)}, "outside the vocabulary of 509"),
        ({"phase": "prefill", "samples": (Sample((5, 6)),)}, "response of length 0"),
        ({"contract_overrides": {"norm": {"rounding.out": "float32"}}}, "cannot be overridden"),
    ],
)
def test_a_plan_it_cannot_run_is_refused_and_the_engine_lives_on(
    changes: dict[str, Any], named: str, tp1: Engine, tmp_path: Path
) -> None:
    with pytest.raises(RlkError, match=named):
        tp1.session.capture(plan_for(CONFIG, tmp_path / "trace", **{"phase": "decode", **changes}))
    assert not list(tmp_path.iterdir())
    assert digests(tp1.capture(level="digest"))["norm"]


@on_cpu
def test_tokens_are_drawn_while_prompts_are_prefilled_in_chunks(crowded: Engine, tmp_path: Path) -> None:
    """From one generator, seeded anew: a capture draws what it drew before, and other tokens of another seed."""
    samples = tuple(replace(s, response_token_ids=()) for s in batch())
    plan = plan_for(crowded.config, tmp_path / "a", samples=samples, phase="decode", generate=6, level="digest")
    drawn = [
        crowded.session.capture(replace(plan, out=tmp_path / name, seed=seed)).samples
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    header = Trace(tmp_path / "a").header
    assert header.evidence["scheduler"]["prefill_chunks"] > 0
    assert header.object.random_state == {"seed": 3, "stream": "the worker's generator"}
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor_parallel": 3}, "num_attention_heads = 4 is not divisible"),
        ({"extra": {"vocab_multiple": 16}}, "'vocab_multiple' is unknown"),
        ({"extra": {"logprobs_mode": "cooked"}}, "logprobs_mode 'cooked' is unknown"),
        ({"model_overrides": {"hidden_size": 64}}, "'hidden_size'"),
        ({"weight_flips": (("model.nonsense", 0, 0),)}, "no weight 'model.nonsense'"),
        ({"weight_flips": (("model.norm.weight", 128, 0),)}, r"model\.norm\.weight\[128\] bit 0 is outside"),
        ({"profile": "vllm-0.32-cpu"}, "describes an engine"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
    ],
)
def test_bad_options_are_named(changes: dict[str, Any], named: str) -> None:
    from diffcheck.capture.vllm import Adapter

    with pytest.raises(InputError, match=named):
        Adapter(replace(OPTIONS, **changes), quiet)


def test_unknown_release_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffcheck.capture.vllm import engine

    def old(name: str) -> str:
        if name == "vllm":
            return "0.9.2"
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(engine, "version", old)
    with pytest.raises(EngineError, match=r"vLLM 0\.9\.2 is not supported") as caught:
        engine.check_version()
    assert "0.22.1" in caught.value.remedy and "0.32.0" in caught.value.remedy


@pytest.mark.exhaustive
def test_a_cache_too_small_to_start_is_explained(tmp_path: Path) -> None:
    options = replace(OPTIONS, extra={"num_gpu_blocks_override": 1, "block_size": 32})
    with pytest.raises(EngineError) as caught, EngineSession(options, quiet, tmp_path / "log") as session:
        session.wait_ready()
    assert "vLLM did not start" in caught.value.cause and "VLLM_CPU_KVCACHE_SPACE" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "device", "remedy"),
    [
        ("No available memory for the cache blocks.", "cpu", "VLLM_CPU_KVCACHE_SPACE"),
        ("No available memory for the cache blocks.", "cuda", "start again, alone on the device"),
        (
            "Error in memory profiling. Initial free memory 9 GiB, current free memory 12 GiB. This happens when other "
            "processes sharing the same container release GPU memory while vLLM is profiling during initialization.",
            "cuda",
            "start again, alone on the device",
        ),
        (
            "Free memory on device cuda:0 (3/139 GiB) on startup is less than desired GPU memory utilization (0.9).",
            "cuda",
            "start again, alone on the device",
        ),
        ("CUDA out of memory. Tried to allocate 2 GiB", "cuda", "free memory"),
        ("[Errno 98] Address already in use", "cpu", "MASTER_PORT"),
        ("", "cpu", "--debug"),
    ],
)
def test_faults_of_the_engine_get_one_line_and_a_remedy(text: str, device: str, remedy: str, tmp_path: Path) -> None:
    from diffcheck.capture.vllm.engine import engine_error

    error = engine_error("failed in the middle", RuntimeError(f"{text}\nmore lines"), device)
    assert remedy in error.remedy and "\n" not in error.cause
    # Who it is stands there once, whoever tells it on.
    told = told_error("vllm", describe_error(error), tmp_path / "log")
    assert told.cause == error.cause and told.cause.startswith("vLLM failed in the middle")


def test_the_head_sizes_checked_before_a_start_are_vllms() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from diffcheck.capture.strict import CPU_HEAD_SIZES

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()


def test_an_engine_takes_the_gpu_memory_it_needs() -> None:
    from diffcheck.capture.vllm.engine import memory_share

    gib = 1 << 30
    assert memory_share(OPTIONS, CONFIG, FOLDER, 96, 100 * gib) == 0.045
    wide = replace(CONFIG, num_hidden_layers=50, num_attention_heads=64, num_key_value_heads=64, head_dim=128)
    assert memory_share(OPTIONS, wide, FOLDER, 4096, 200 * gib) == 0.525
    assert memory_share(OPTIONS, wide, FOLDER, 4096, 10 * gib) == 0.9
