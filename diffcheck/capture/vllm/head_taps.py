"""Hooks on logits, sampler and logprobs, and the teacher that makes the engine decode recorded tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffcheck.base.errors import EngineError
from diffcheck.capture.live import Taps
from diffcheck.capture.vllm.taps import Live
from diffcheck.rows import Rows

Tensor = Any


def tap_head(taps: Taps, live: Live, model: Any, sampler: Any, logprobs_mode: str) -> None:
    """Observe logits, processed logits and logprobs; force the recorded tokens of samples that have a response.

    Args:
        logprobs_mode: "raw_logprobs" (of the model's distribution) or "processed_logprobs" (after temperature, top-k
            and top-p), as vLLM names them.
    """
    _tap_logits(taps, live, model.logits_processor)
    _tap_processed(taps, live, sampler, logprobs_mode)
    _tap_logprobs(taps, live, sampler)
    if any(s.response_token_ids for s in live.plan.samples) and live.plan.phase == "decode":
        _force(taps, live, sampler)
    _tap_logsumexp(taps, live, sampler)


def head_rows(live: Live, hidden: Tensor) -> Rows:
    """Rows of the hidden states [rows, hidden] that the head is applied to.

    Prompt logprobs come from a view of the forward's output, whose place in it says which tokens they are; the
    sampler's rows are a gathered copy, one a request.

    Raises:
        EngineError: neither.
    """
    assert live.step is not None
    if hidden.untyped_storage().data_ptr() == live.hidden.untyped_storage().data_ptr():
        first, rest = divmod(hidden.storage_offset() - live.hidden.storage_offset(), live.hidden.stride(0))
        if rest == 0 and 0 <= first <= len(live.step.rows) - hidden.shape[0]:
            return live.step.rows.take(slice(first, first + hidden.shape[0]))
    elif hidden.shape[0] == len(live.step.head):
        return live.step.head
    raise EngineError(f"cannot tell which tokens {hidden.shape[0]} rows of logits belong to")


def _tap_logits(taps: Taps, live: Live, module: Any) -> None:
    def received(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        live.head = head_rows(live, call[0][1])
        return call

    taps.input(module, lambda args, kwargs: live.safely(received, (args, kwargs)))
    taps.output(module, lambda output: live.safely(lambda x: live.seen("logits", x, live.head, whole=True), output))


def _tap_processed(taps: Taps, live: Live, sampler: Any, logprobs_mode: str) -> None:
    """What the log-softmax is taken of."""

    def show(logits: Tensor) -> Tensor:
        return live.safely(lambda x: live.seen("processed_logits", x, live.head, whole=True), logits)

    for owner in (sampler, sampler.topk_topp_sampler):
        taps.attribute(owner, "logprobs_mode", lambda _: logprobs_mode)
    if logprobs_mode == "raw_logprobs" or live.plan.phase == "prefill":
        taps.attribute(sampler, "compute_logprobs", lambda original: lambda logits: original(show(logits)))
        return
    strict = getattr(sampler.topk_topp_sampler, "processed_logits", None)
    if strict is not None:
        taps.output(strict, show)
        return
    from vllm.v1.sample.ops import topk_topp_sampler

    outermost = True

    def make(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def apply(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal outermost
            if not outermost:
                return original(*args, **kwargs)
            outermost = False
            try:
                filtered = original(*args, **kwargs)
            finally:
                outermost = True
            return show(filtered)

        return apply

    # Which of the two is called depends on version and device, and one may call the other.
    for name in ("apply_top_k_top_p", "apply_top_k_top_p_pytorch"):
        taps.attribute(topk_topp_sampler, name, make)


def _tap_logsumexp(taps: Taps, live: Live, sampler: Any) -> None:
    """A strict sampler forms it in a module of its own; vLLM's never has it."""
    module = getattr(sampler, "logsumexp", None)
    if module is None:
        why = "torch.log_softmax sums inside one operator and returns only the difference"
        live.recorder.cannot_observe("logsumexp", why)
        return
    taps.output(module, lambda output: live.safely(lambda x: live.seen("logsumexp", x, live.head, whole=True), output))


def _tap_logprobs(taps: Taps, live: Live, sampler: Any) -> None:
    def show(gathered: Any) -> Any:
        # Column 0 is the token that was sampled, or that the prompt has.
        assert live.head is not None
        live.targets.see(live.head, gathered.logprob_token_ids[:, 0])
        changed = live.replaced("logprobs", gathered.logprobs[:, :1], live.head, whole=True)
        if changed is None:
            return gathered
        logprobs = gathered.logprobs.clone()
        logprobs[:, :1] = changed
        return gathered._replace(logprobs=logprobs)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: live.safely(show, original(*args, **kwargs))

    taps.attribute(sampler, "gather_logprobs", make)


def _force(taps: Taps, live: Live, sampler: Any) -> None:
    """Replace each draw by the recorded token. Distribution, logprobs and random numbers stay the engine's own."""

    def force(result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        drawn = result[0].clone()
        assert live.head is not None
        for i, (sample, position) in enumerate(zip(live.head.sample, live.head.position, strict=True)):
            if sample < 0:
                continue
            recorded = live.plan.samples[sample]
            if recorded.response_token_ids:
                drawn[i] = recorded.response_token_ids[position + 1 - len(recorded.prompt_token_ids)]
        return drawn, result[1]

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: live.safely(force, original(*args, **kwargs))

    taps.attribute(sampler, "sample", make)
