"""vime's hook points against the stated interface: bits of the strict path, true gradients, and nothing in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from diffcheck.base.errors import EngineError, RlkError  # noqa: E402
from integration import vime  # noqa: E402
from integration.backends.arrays import ArrayOperators  # noqa: E402
from integration.linear_logp_request import RequestError, UnavailableError  # noqa: E402
from integration.megatron import functions  # noqa: E402
from tests.integration import vime_cases as cases  # noqa: E402
from tests.integration.strict_cases import PROFILE, quiet  # noqa: E402

Tensor = Any
OWN = ArrayOperators(PROFILE, torch.float32)


@pytest.fixture(autouse=True)
def profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_PROFILE", PROFILE)


def run(call: cases.Call) -> Any:
    return cases.as_vime(vime.linear_logp, call, "strict")


def same_bits(left: Tensor, right: Tensor) -> bool:
    kind = torch.int16 if left.element_size() == 2 else torch.int32
    a, b = (side.detach().contiguous().view(kind) for side in (left, right))
    return a.shape == b.shape and torch.equal(a, b)


def strict_logp(logits: Tensor, targets: Tensor, temperature: float = 1.0, top_p: float | None = None) -> Tensor:
    """What the strict Megatron path computes."""
    processed = functions.ProcessedLogits.apply(OWN, logits, cases.REAL, (temperature, None, top_p), None)
    return functions.LogProb.apply(OWN, processed, targets, lambda value: value)[:, None]


def test_bits_are_those_of_the_strict_path() -> None:
    call = cases.logits_call(temperature=0.7)
    assert same_bits(run(call)["logp"], strict_logp(call.logits, call.target_ids, 0.7))
    hidden = cases.hidden_call()
    own = ArrayOperators(PROFILE, torch.bfloat16)
    context = hidden.context
    logits = functions.Linear.apply(own, context.hidden, context.projection.weight, None, "lm_head", None)
    assert same_bits(run(hidden)["logp"], strict_logp(logits, hidden.target_ids))


def test_entropy_is_the_contracts_and_close_to_float64() -> None:
    call = cases.logits_call(with_entropy=True, temperature=0.7)
    exact = (call.logits.detach().double()[:, : cases.REAL] / 0.7).log_softmax(-1)
    found = run(call)["entropy"]
    assert (found.double() + (exact.exp() * exact).sum(-1)).abs().max() < 2e-6
    assert OWN.contracts["entropy"].contract_id in run(call)["provenance"]["contracts"].values()


@pytest.mark.parametrize("chunk", [1, 5, 13, 64])
@pytest.mark.parametrize("make", [cases.logits_call, cases.hidden_call])
def test_chunks_do_not_show_in_any_bit(chunk: int, make: Callable[..., cases.Call]) -> None:
    whole, parts = (
        make(with_entropy=True, with_entropy_grad=True, temperature=1.3, chunk_size=size) for size in (-1, chunk)
    )
    left, right = run(whole), run(parts)
    assert same_bits(left["logp"], right["logp"]) and same_bits(left["entropy"], right["entropy"])
    for a, b in zip(cases.backward(whole, left).values(), cases.backward(parts, right).values(), strict=True):
        assert same_bits(a, b)


def test_a_temperature_a_token() -> None:
    call = cases.logits_call()
    values = torch.tensor([0.5, 1.0, 1.7])[torch.arange(cases.TOKENS) % 3]
    mixed = run(replace(call, temperature=values))["logp"]
    for one in (0.5, 1.0, 1.7):
        rows = values == one
        alone = strict_logp(call.logits[rows], call.target_ids[rows], float(values[rows][0]))
        assert same_bits(mixed[rows], alone)
    mixed.sum().backward()
    again = cases.logits_call(temperature=values, chunk_size=4)
    run(again)["logp"].sum().backward()
    assert call.logits.grad.any() and same_bits(call.logits.grad, again.logits.grad)
    # d logp / d logits = (one-hot - p) / T, so that a row's gradient is 1 / T - p / T at its target.
    p = mixed.detach().exp()[:, 0]
    at_target = call.logits.grad.gather(1, call.target_ids[:, None])[:, 0]
    assert (at_target - (1 - p) / values).abs().max() < 1e-6
    for same in (torch.tensor(0.7), torch.tensor([0.7]), torch.full((cases.TOKENS,), 0.7)):
        value = float(same.reshape(-1)[0])
        assert same_bits(run(replace(call, temperature=same))["logp"], strict_logp(call.logits, call.target_ids, value))


def test_a_replayed_top_p_mask_gives_the_bits_of_top_p() -> None:
    call = cases.logits_call()
    processed = OWN.processed_logits(call.logits.detach()[:, : cases.REAL], 1.0, None, 0.8)
    targets = processed.argmax(-1)
    padding = torch.zeros(cases.TOKENS, cases.PADDED - cases.REAL, dtype=torch.bool)
    mask = torch.cat([~torch.isneginf(processed), padding], dim=-1)
    assert 0 < int(mask.sum()) < cases.TOKENS * cases.REAL
    found = run(replace(call, target_ids=targets, log_prob_keep_mask=mask))
    assert same_bits(found["logp"], strict_logp(call.logits, targets, 1.0, 0.8))
    found["logp"].sum().backward()
    assert not call.logits.grad[~mask].any() and call.logits.grad[mask].any()


def test_no_mask_hides_a_nan() -> None:
    call = cases.logits_call()
    mask = torch.zeros(cases.TOKENS, cases.PADDED, dtype=torch.bool).index_fill(1, torch.tensor([3, 4]), True)
    with torch.no_grad():
        call.logits[2, 9] = torch.nan
    found = run(replace(call, target_ids=torch.full((cases.TOKENS,), 3), log_prob_keep_mask=mask))["logp"]
    assert torch.isnan(found[:, 0]).nonzero().tolist() == [[2]]


@pytest.mark.parametrize("layout", ["zigzag", "allgather"])
def test_rows_of_a_context_parallel_rank_have_the_bits_they_have_in_one_sequence(layout: str) -> None:
    """A row is computed from itself alone, in whatever order a rank holds rows."""
    call = cases.logits_call()
    whole = run(call)["logp"]
    mine = torch.tensor([9, 0, 4, 12, 3])
    part = replace(
        call,
        logits=call.logits.detach()[mine].requires_grad_(),
        target_ids=call.target_ids[mine],
        token_layout=cases.Layout(2, 1, layout),
    )
    assert same_bits(run(part)["logp"], whole[mine])


def test_no_tokens_are_served_and_stay_in_the_graph() -> None:
    call = cases.logits_call(with_entropy=True, with_entropy_grad=True)
    none = replace(call, logits=call.logits[:0], target_ids=call.target_ids[:0])
    result = run(none)
    result["logp"].sum().backward()
    assert result["logp"].shape == (0, 1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("make", [cases.logits_call, lambda **c: cases.hidden_call(dtype=torch.float32, **c)])
def test_gradients_are_those_of_float64_and_the_same_bits_each_run(masked: bool, make: Any) -> None:
    mask = cases.numbers(6, cases.TOKENS, cases.PADDED) > -1 if masked else None
    first, second = (make(log_prob_keep_mask=mask, **cases.SHARED) for _ in range(2))
    mine, again = cases.backward(first, run(first)), cases.backward(second, run(second))
    leaves = [first.logits] if first.context is None else [first.context.hidden, first.context.projection.weight]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = wide[0] if first.context is None else wide[0] @ wide[1].t()
    scaled = logits[:, : cases.REAL] / first.temperature
    if mask is not None:
        scaled = scaled.masked_fill(~mask[:, : cases.REAL], -torch.inf)
    log_p = scaled.log_softmax(-1)
    logp = log_p.gather(1, first.target_ids[:, None])
    entropy = -(log_p.exp() * log_p.masked_fill(torch.isneginf(log_p), 0.0)).sum(-1)
    kept = torch.isfinite(logp[:, 0])
    weights = cases.numbers(5, cases.TOKENS).double()
    (torch.where(kept, logp[:, 0], 0.0) * weights + entropy * weights.flip(0)).sum().backward()
    for (name, found), exact in zip(mine.items(), wide, strict=True):
        rows = kept if found.shape[0] == cases.TOKENS else slice(None)
        if name == "weight" and not kept.all():
            continue  # rows whose target is masked have logp -inf: no finite loss, no gradient to compare
        scale = exact.grad.abs().max()
        assert (found.double() - exact.grad)[rows].abs().max() <= 4e-6 * scale, name
        assert same_bits(found, again[name])


def test_entropy_without_gradient_is_detached() -> None:
    call = cases.logits_call(with_entropy=True)
    result = run(call)
    assert not result["entropy"].requires_grad and result["logp"].requires_grad


def test_two_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.integration.vime_cases"]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], cwd=root, env=dict(os.environ)) for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    sides = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for name, make in (("logits", cases.logits_call), ("hidden", cases.hidden_call)):
        for masked in (False, True):
            mask = cases.numbers(6, cases.TOKENS, cases.PADDED) > -1 if masked else None
            call = make(log_prob_keep_mask=mask, **cases.SHARED)
            alone = run(call)
            grads = cases.backward(call, alone)
            found = [side[f"{name} {masked}"] for side in sides]
            for side in found:
                assert same_bits(side["logp"], alone["logp"]) and same_bits(side["entropy"], alone["entropy"])
                assert side["contract_id"] == alone["contract_id"]
            if name == "logits":
                assert same_bits(torch.cat([side["dlogits"] for side in found], dim=-1), grads["logits"])
            elif not masked:
                assert same_bits(torch.cat([side["dweight"] for side in found]), grads["weight"])
                # Shared by the ranks: the same bits on both; against one rank the sum has another order.
                assert same_bits(found[0]["dhidden"], found[1]["dhidden"])
                gap = (found[0]["dhidden"].float() - grads["hidden"].float()).abs().max()
                assert gap <= 2**-7 * grads["hidden"].float().abs().max()


def _context(**changes: Any) -> Callable[[], cases.Call]:
    def make() -> cases.Call:
        call = cases.hidden_call()
        return replace(call, context=replace(call.context, **changes))

    return make


def _partition(**changes: Any) -> Callable[[], cases.Call]:
    def make() -> cases.Call:
        call = cases.hidden_call()
        partition = replace(call.context.vocab_partition, **changes)
        return replace(call, context=replace(call.context, vocab_partition=partition))

    return make


def _changed(**changes: Any) -> Callable[[], cases.Call]:
    return lambda: cases.logits_call(**changes)


class Group:
    """A process group of more ranks than there are."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


T, V = cases.TOKENS, cases.PADDED
CONTRADICTIONS: dict[str, Callable[[], Any]] = {
    "request has no field logits": lambda: object(),
    "logits is a list": _changed(logits=[1.0]),
    "logits has shape": _changed(logits=torch.zeros(T, 2, V)),
    "logits is torch.int64": _changed(logits=torch.zeros(T, V, dtype=torch.int64)),
    "target_ids is torch.float32": _changed(target_ids=torch.zeros(T)),
    "target_ids is torch.bool": _changed(target_ids=torch.zeros(T, dtype=torch.bool)),
    r"target_ids has shape \(4,\)": _changed(target_ids=torch.zeros(4, dtype=torch.int64)),
    "target_ids is on meta": _changed(target_ids=torch.zeros(T, dtype=torch.int64, device="meta")),
    "target_ids holds 41 to 41, the vocabulary has 41": _changed(target_ids=torch.full((T,), cases.REAL)),
    "target_ids holds -1": _changed(target_ids=torch.full((T,), -1)),
    "tensor_parallel_group is a str": _changed(tensor_parallel_group="tp"),
    "rank 3 of 2": _changed(tensor_parallel_group=Group(3, 2)),
    "token_layout has no field world_size": _changed(token_layout=None),
    "token_layout is rank 2 of 2": _changed(token_layout=cases.Layout(2, 2, "zigzag")),
    "layout is 'single' with 2 ranks": _changed(token_layout=cases.Layout(2, 0, "single")),
    "layout is 'zigzag' with 1 ranks": _changed(token_layout=cases.Layout(1, 0, "zigzag")),
    "layout is 'ring'": _changed(token_layout=cases.Layout(2, 0, "ring")),
    "with_entropy is 1": _changed(with_entropy=1),
    "with_entropy_grad is None": _changed(with_entropy_grad=None),
    "chunk_size is 2.5": _changed(chunk_size=2.5),
    "chunk_size is True": _changed(chunk_size=True),
    "log_prob_keep_mask is no bool": _changed(log_prob_keep_mask=torch.ones(T, V)),
    r"log_prob_keep_mask has shape \(13, 3\)": _changed(log_prob_keep_mask=torch.ones(T, 3, dtype=torch.bool)),
    "keeps no column of some row": _changed(log_prob_keep_mask=torch.zeros(T, V, dtype=torch.bool)),
    "temperature is not above 0": _changed(temperature=0.0),
    "temperature is not above 0 and": _changed(temperature=float("nan")),
    "temperature is not above 0 and finite": _changed(temperature=torch.linspace(0, 1, T)),
    "temperature has shape": _changed(temperature=torch.ones(T - 1)),
    "temperature is 'hot'": _changed(temperature="hot"),
    "temperature requires a gradient": _changed(temperature=torch.ones(T, requires_grad=True)),
    "metadata is a list": _changed(metadata=[]),
    r"metadata\['tp_rank'\] is 1": _changed(metadata={"tp_rank": 1, "real_vocab_size": 41}),
    "60 real columns of 48": _changed(metadata={"real_vocab_size": 60}),
    "real_vocab_size is '41'": _changed(metadata={"real_vocab_size": "41"}),
    "context has no field projection": lambda: replace(
        cases.hidden_call(),
        context=Namespace(hidden=torch.zeros(T, 8), vocab_partition=cases.Partition(0, V, cases.REAL, V)),
    ),
    r"context.hidden has shape \(3, 32\)": _context(hidden=torch.zeros(3, cases.HIDDEN, dtype=torch.bfloat16)),
    "hidden is torch.float32, projection.weight is torch.bfloat16": _context(hidden=torch.zeros(T, cases.HIDDEN)),
    r"projection.weight has shape \(48, 5\)": _context(projection=cases.Projection(torch.zeros(V, 5))),
    "projection.bias has shape": _context(
        projection=cases.Projection(torch.zeros(V, cases.HIDDEN, dtype=torch.bfloat16), torch.zeros(3))
    ),
    "local_size is 40": _partition(local_size=40),
    "real_size is 4.5": _partition(real_size=4.5),
    "0 real columns": _partition(real_size=0),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_a_request_that_contradicts_itself_is_an_error_in_both_modes(message: str, mode: str) -> None:
    with pytest.raises(RequestError, match=message):
        cases.as_vime(vime.linear_logp, CONTRADICTIONS[message](), mode)


UNAVAILABLE: dict[str, Callable[[], cases.Call]] = {
    "logits are bfloat16": _changed(logits=torch.zeros(T, V, dtype=torch.bfloat16)),
    "run on a CPU, logits are on meta": _changed(
        logits=torch.zeros(T, V, device="meta"), target_ids=torch.zeros(T, dtype=torch.int64, device="meta")
    ),
    "nowhere how many columns": _changed(metadata={}),
    "a head with a bias": _context(
        projection=cases.Projection(torch.zeros(V, cases.HIDDEN, dtype=torch.bfloat16), torch.zeros(V))
    ),
    "do not tile 48 columns evenly": _partition(local_start=8),
    "do not tile 96 columns evenly": _partition(padded_size=96),
    "context.hidden is float64": _context(
        hidden=torch.zeros(T, cases.HIDDEN, dtype=torch.float64),
        projection=cases.Projection(torch.zeros(V, cases.HIDDEN, dtype=torch.float64)),
    ),
}


@pytest.mark.parametrize("message", UNAVAILABLE)
def test_what_no_contract_covers_goes_native_in_auto_only(message: str) -> None:
    with pytest.raises(cases.NativeError) as native:
        cases.as_vime(vime.linear_logp, UNAVAILABLE[message](), "auto")
    assert isinstance(native.value.__cause__, UnavailableError)
    for provider, mode in (
        (vime.linear_logp, "strict"),
        (vime.strict_linear_logp, "strict"),
        (vime.strict_linear_logp, "auto"),
    ):
        with pytest.raises(RlkError, match=message):
            cases.as_vime(provider, UNAVAILABLE[message](), mode)


@pytest.mark.parametrize("profile", ["", "vllm-0.32-cpu", "strict-v9"])
def test_without_a_strict_profile_the_trainer_is_native_as_the_rollout_is(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLK_PROFILE", profile)
    with pytest.raises(cases.NativeError):
        cases.as_vime(vime.linear_logp, cases.logits_call(), "auto")
    with pytest.raises(RlkError, match="follows no strict profile"):
        cases.as_vime(vime.strict_linear_logp, cases.logits_call(), "auto")


def test_a_fault_of_ours_is_no_request_for_the_native_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (AttributeError("no such attribute"), ImportError("no such module")):
        monkeypatch.setattr(vime, "compute", lambda *_, fault=fault: (_ for _ in ()).throw(fault))
        with pytest.raises(EngineError, match="no such"):
            cases.as_vime(vime.linear_logp, cases.logits_call(), "auto")


def test_the_result_says_what_computed_it() -> None:
    result = run(cases.hidden_call(with_entropy=True))
    proof = result["provenance"]
    assert result["backend_id"] in ("rlk.cpu.loops", "rlk.cpu.operators")
    assert result["contract_id"].startswith(f"{PROFILE}:") and proof["fallbacks"] == 0
    assert sorted(proof["contracts"]) == ["entropy", "lm_head", "logprob", "logsumexp", "processed_logits"]
    assert (proof["real_vocab_size"], proof["real_vocab_size_from"]) == (cases.REAL, "context")
    assert run(cases.logits_call())["contract_id"] != result["contract_id"]


def test_metrics_change_neither_loss_nor_masks_and_see_one_bit() -> None:
    train = [cases.numbers(7, 3), cases.numbers(8, 5)]
    rollout = [x.clone() for x in train]
    rollout[1][2] = torch.nextafter(rollout[1][2], torch.tensor(0.0))
    loss, masks = cases.numbers(9, 8), [torch.ones(3), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])]
    request = {"pg_loss": loss, "train_log_probs": train, "rollout_log_probs": rollout, "loss_masks": masks}
    same_loss, same_masks, metrics = vime.mismatch_metrics(Namespace(), **request, total_lengths=[9, 9])
    assert same_loss is loss and all(a is b for a, b in zip(same_masks, masks, strict=True))
    assert metrics["rlk_mismatch"].tolist() == [0.0] * 5 + [1.0] + [0.0] * 2
    assert metrics["rlk_abs_diff"][5] > 0 and metrics["rlk_abs_diff"].sum() == metrics["rlk_abs_diff"][5]
    with pytest.raises(EngineError, match=r"1 of 7 logprobs differ.*sample 1 of this batch, response token 2"):
        vime.strict_mismatch_metrics(Namespace(), **request)
    hidden = {**request, "loss_masks": [masks[0], torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])]}
    assert vime.strict_mismatch_metrics(Namespace(), **hidden)[0] is loss


def test_metrics_of_nothing_or_of_other_tokens_are_refused() -> None:
    empty = {"pg_loss": torch.zeros(0), "train_log_probs": [], "rollout_log_probs": [], "loss_masks": []}
    with pytest.raises(RequestError, match="0 rollout"):
        vime.mismatch_metrics(Namespace(), **empty)
    one = {**empty, "train_log_probs": [torch.zeros(2)], "rollout_log_probs": [torch.zeros(3)]}
    with pytest.raises(RequestError, match="3 rollout and 2 train"):
        vime.mismatch_metrics(Namespace(), **one)
    wide = {**empty, "train_log_probs": [torch.zeros(2).double()], "rollout_log_probs": [torch.zeros(2)]}
    with pytest.raises(RequestError, match="float32"):
        vime.mismatch_metrics(Namespace(), **wide)


@pytest.fixture(scope="module")
def trainer() -> Iterator[Any]:
    """A strict Megatron-core model in this process."""
    pytest.importorskip("megatron.core")
    from diffcheck.base.models import resolve_model
    from diffcheck.capture.adapter import open_adapter
    from diffcheck.capture.plan import EngineOptions

    folder, _ = resolve_model("tiny-qwen3")
    adapter = open_adapter(EngineOptions("megatron", folder, dtype="bfloat16", profile=PROFILE, max_length=64), quiet)
    yield adapter
    adapter.close()


def arguments(adapter: Any, **changes: Any) -> Namespace:
    """Megatron's arguments, as far as the hook looks at them."""
    values = {"spec": None, "rotary_base": adapter.config.rope_theta, "transformer_impl": "local", "num_experts": None}
    return Namespace(**{**values, "add_bias_linear": False, "normalization": "RMSNorm", **changes})


@pytest.mark.engines
def test_a_model_built_through_the_hooks_scores_as_the_strict_one(trainer: Any) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from integration.megatron import plugin

    args = arguments(trainer)
    told = vime.megatron_init(args)
    assert told["profile"] == PROFILE and args.spec == ["integration.vime", "layer_spec"]
    strict, config = trainer.model, trainer.model.config
    assert vars(vime)[args.spec[1]] is vime.layer_spec
    model = GPTModel(
        config,
        vime.layer_spec(args, config),
        vocab_size=trainer.padded_vocab,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=trainer.config.rope_theta,
        share_embeddings_and_output_weights=trainer.config.tie_word_embeddings,
    ).to(torch.bfloat16)
    model.load_state_dict(strict.state_dict(), strict=False)
    ids = torch.randint(3, 509, (2, 21), generator=torch.Generator().manual_seed(4))
    width = ids.shape[1] - 1
    mask = torch.ones(1, 1, width, width, dtype=torch.bool).triu(1)
    seen: list[Any] = []
    model.output_layer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    logits = model(ids[:, :-1], torch.arange(width).expand(2, -1), mask)
    weight = model.output_layer.weight
    if weight is None:
        weight = model.embedding.word_embeddings.weight
    # Rows as the head has them: by position, then sample.
    hidden = seen[0].reshape(2 * width, -1)
    partition = cases.Partition(0, weight.shape[0], trainer.config.vocab_size, weight.shape[0])
    call = cases.Call(
        logits.transpose(0, 1).reshape(2 * width, -1),
        ids[:, 1:].t().reshape(-1),
        context=cases.Context(hidden, cases.Projection(weight), partition),
        temperature=0.8,
        metadata={},
    )
    found = cases.as_vime(vime.strict_linear_logp, call, "strict")
    wanted = plugin.logprobs(
        strict,
        strict(ids[:, :-1], torch.arange(width).expand(2, -1), mask),
        ids[:, 1:],
        vocabulary=trainer.config.vocab_size,
        temperature=0.8,
    )
    assert same_bits(found["logp"][:, 0].reshape(width, 2).t(), wanted)
    found["logp"].sum().backward()
    wanted.sum().backward()
    grads = {name: parameter.grad for name, parameter in strict.named_parameters()}
    for name, parameter in model.named_parameters():
        if "word_embeddings" in name:
            # Looking rows up is Megatron's own here; it adds gradients of one token in another order.
            gap = (parameter.grad.float() - grads[name].float()).abs().max()
            assert gap <= 2**-7 * grads[name].float().abs().max()
        else:
            assert same_bits(parameter.grad, grads[name]), name


@pytest.mark.engines
@pytest.mark.parametrize(
    "changes",
    [
        {"transformer_impl": "transformer_engine"},
        {"context_parallel_size": 2},
        {"num_experts": 8, "sequence_parallel": True},
        {"attention_dropout": 0.1},
        {"normalization": "LayerNorm"},
        {"spec": ["somebody", "else"]},
    ],
)
def test_megatron_settings_without_a_contract_stop_the_rank(trainer: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(EngineError) as found:
        vime.megatron_init(arguments(trainer, **changes))
    assert all(name in found.value.cause for name in changes)


def test_megatron_without_a_profile_stops_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.delenv("RLK_PROFILE")
    with pytest.raises(EngineError, match="RLK_PROFILE is ''"):
        vime.megatron_init(Namespace())
