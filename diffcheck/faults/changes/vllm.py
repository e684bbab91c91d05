"""Changes of a live vLLM, strict or native: attributes, hooks and options of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from diffcheck.capture.live import Taps
from diffcheck.capture.vllm.schedule import SAMPLE
from diffcheck.faults.changes.live import Live
from diffcheck.faults.changes.positions import zigzag_positions
from diffcheck.rows import IntArray

Tensor = Any


@contextmanager
def logprobs_mode(live: Live, mode: str) -> Iterator[None]:
    """vLLM's own switch: raw_logprobs leaves out temperature, top-k and top-p, which processed_logprobs takes in."""
    before = live.adapter.extra["logprobs_mode"]
    live.adapter.extra["logprobs_mode"] = mode
    try:
        yield
    finally:
        live.adapter.extra["logprobs_mode"] = before


@contextmanager
def environment(_live: Live, **variables: Any) -> Iterator[None]:
    """Switches that vLLM reads at every step. It remembers its environment, so they are set where it looks them up."""
    from vllm import envs

    with Taps() as taps:
        for name, value in variables.items():
            taps.attribute(envs, name, lambda _, value=value: value)  # type: ignore[misc]
        yield


@contextmanager
def attention(live: Live, **attributes: Any) -> Iterator[None]:
    """Attributes of every layer's live attention (scale, sliding_window), multiplied where given as ["times", x]; a
    number for ``sinks`` is one sink a head.
    """
    import torch

    def value(impl: Any, name: str, given: Any) -> Any:
        if isinstance(given, list):
            return getattr(impl, name) * given[1]
        return torch.full((impl.num_heads,), given) if name == "sinks" else given

    with Taps() as taps:
        for layer in live.model.model.layers:
            impl = layer.self_attn.attn.impl
            for name, given in attributes.items():
                changed = value(impl, name, given)
                taps.attribute(impl, name, lambda _, changed=changed: changed)  # type: ignore[misc]
        yield


@contextmanager
def rope_table(live: Live, *, theta: float = 0.0, index: int = -1, dtype: str = "") -> Iterator[None]:
    """The live RoPE table, made with another ``theta``, the inverse frequency ``index`` 1 ulp larger, or rounded to
    ``dtype``.
    """
    import torch

    rotary = live.model.model.layers[0].self_attn.rotary_emb
    honest, base = rotary.cos_sin_cache, rotary.base
    inverse = rotary._compute_inv_freq(theta or base)
    if index >= 0:
        inverse[index] = torch.nextafter(inverse[index], torch.tensor(1.0))
    angles = torch.arange(honest.shape[0], dtype=torch.float32)[:, None] * inverse
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    if dtype:
        table = table.to(getattr(torch, dtype))
    rotary.cos_sin_cache, rotary.base = table.to(honest.dtype), theta or base
    try:
        yield
    finally:
        rotary.cos_sin_cache, rotary.base = honest, base


@contextmanager
def positions(live: Live, order: str) -> Iterator[None]:
    """Positions as a batch padded on the left counts them ("padded"), or in context-parallel "zigzag" order."""
    lengths = [len(s.token_ids) for s in live.plan.samples]
    longest = max(lengths)

    def moved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        import torch

        given = args[0]
        rows = _samples_of_rows(live.runner)
        shown = given.clone()
        for i, sample in enumerate(rows.tolist()):
            length, place = lengths[sample], int(given[i])
            shown[i] = place + longest - length if order == "padded" else zigzag_positions(length)[place]
        return (shown.to(torch.int64), *args[1:]), kwargs

    with Taps() as taps:
        taps.input(live.model.model.layers[0].self_attn.rotary_emb, moved)
        yield


def _samples_of_rows(runner: Any) -> IntArray:
    """The sample of each row of the step that the runner computes."""
    batch = runner.input_batch
    ids = batch.req_ids[: batch.num_reqs]
    counts = np.diff(runner.query_start_loc.np[: len(ids) + 1])
    return np.repeat([int(runner.requests[i].sampling_params.extra_args[SAMPLE]) for i in ids], counts)


@contextmanager
def late_logprobs(live: Live) -> Iterator[None]:
    """Every decoded token is handed the logprob of the token before it."""
    last: dict[str, Tensor] = {}

    def make(gather: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            gathered = gather(*args, **kwargs)
            late = gathered.logprobs.clone()
            for row, request in enumerate(live.runner.input_batch.req_ids[: len(late)]):
                own = gathered.logprobs[row].clone()
                late[row] = last.get(request, own)
                last[request] = own
            return gathered._replace(logprobs=late)

        return run

    with Taps() as taps:
        taps.attribute(live.runner.sampler, "gather_logprobs", make)
        yield


@contextmanager
def log_of_softmax(live: Live) -> Iterator[None]:
    """log(softmax(x)) written out in place of the log-softmax."""
    with Taps() as taps:
        taps.attribute(
            live.runner.sampler, "compute_logprobs", lambda _: lambda logits: logits.float().softmax(dim=-1).log()
        )
        yield


@contextmanager
def narrow_logits(live: Live, dtype: str) -> Iterator[None]:
    """The head's logits go through ``dtype``."""
    import torch

    with Taps() as taps:
        taps.output(live.model.logits_processor, lambda out: out.to(getattr(torch, dtype)).to(out.dtype))
        yield


@contextmanager
def scaled_values(live: Live, factor: float) -> Iterator[None]:
    """V is multiplied by ``factor`` on its way into the cache: a scale that was applied already."""

    def scaled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0], args[1], args[2] * factor, *args[3:]), kwargs

    with Taps() as taps:
        for layer in live.model.model.layers:
            taps.input(layer.self_attn.attn, scaled)
        yield


@contextmanager
def poisoned_cache(live: Live) -> Iterator[None]:
    """Slots of the KV cache that no request uses hold NaN, as after a step that overflowed. vLLM clears no slot."""
    fill_cache(live, float("nan"))
    try:
        yield
    finally:
        fill_cache(live, 0.0)


def fill_cache(live: Live, value: float) -> None:
    """Put ``value`` into every slot of every layer."""
    for layer in live.model.model.layers:
        layer.self_attn.attn.kv_cache.fill_(value)


@contextmanager
def padded_vocabulary(live: Live) -> Iterator[None]:
    """Columns past the real vocabulary take part in the softmax."""
    processor = live.model.logits_processor
    with Taps() as taps:
        padded = int(live.model.model.embed_tokens.num_embeddings_padded)
        taps.attribute(processor, "org_vocab_size", lambda _: padded)
        yield


@contextmanager
def head_adapter(live: Live, prompts: bool = True) -> Iterator[None]:
    """A low-rank update of the head, as an adapter that is not merged; without ``prompts``, prompt logprobs lack it."""
    import torch

    generator = torch.Generator().manual_seed(4)
    config = live.config
    down, up = (torch.randn(n, generator=generator) * 0.05 for n in (config.hidden_size, config.vocab_size))
    hidden: list[Tensor] = []

    def see(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden[:] = [args[1]]
        return args, kwargs

    def add(logits: Tensor) -> Tensor:
        if live.plan.phase == "prefill" and not prompts:
            return logits
        # Row by row: a matrix product's bits would depend on how many rows the step has.
        deltas = [(row.double() * down.double()).sum().float() * up for row in hidden[0]]
        return logits + torch.stack(deltas)

    with Taps() as taps:
        taps.input(live.model.logits_processor, see)
        taps.output(live.model.logits_processor, add)
        yield


@contextmanager
def batch_order(live: Live) -> Iterator[None]:
    """Requests come in the other way round; all of them are in flight at once."""
    engine = live.adapter.llm.llm_engine
    waiting: list[tuple[Any, ...]] = []

    def step(original: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            while waiting:
                add(*waiting.pop())
            return original()

        return run

    with Taps() as taps:
        add = engine.add_request
        taps.attribute(engine, "add_request", lambda _: lambda *args: waiting.append(args))
        taps.attribute(engine, "step", step)
        taps.attribute(engine, "has_unfinished_requests", lambda original: lambda: bool(waiting) or original())
        yield
