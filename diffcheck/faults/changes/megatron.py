"""Changes of a live Megatron-core model, strict or native, and of the trainer around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diffcheck.capture.live import Taps
from diffcheck.capture.megatron import adapter as trainer
from diffcheck.faults.changes.live import Live
from diffcheck.faults.changes.positions import zigzag_positions

Tensor = Any


@contextmanager
def unshifted_labels(_live: Live) -> Iterator[None]:
    """The loss takes each position's own token as its label, not the next one."""
    with Taps() as taps:
        taps.attribute(trainer, "next_tokens", lambda _: lambda ids: ids[:-1])
        yield


@contextmanager
def late_logprobs(live: Live) -> Iterator[None]:
    """The trainer's list of logprobs is off by one: every token has that of the token before it."""

    def make(logprobs: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: logprobs(*args, **kwargs).roll(1, dims=-1)

    with Taps() as taps:
        taps.attribute(live.adapter._strict, "logprobs", make)
        yield


@contextmanager
def padded_vocabulary(live: Live) -> Iterator[None]:
    """Columns past the real vocabulary take part in the softmax."""
    with Taps() as taps:
        if live.adapter._strict is None:
            taps.attribute(live.adapter, "_mask_padding", lambda _: lambda logits: None)
        else:
            padded = live.adapter.padded_vocab

            def make(logprobs: Callable[..., Tensor]) -> Callable[..., Tensor]:
                return lambda *args, **kwargs: logprobs(*args, **{**kwargs, "vocabulary": padded})

            taps.attribute(live.adapter._strict, "logprobs", make)
        yield


@contextmanager
def narrow_loss(_live: Live, dtype: str) -> Iterator[None]:
    """Megatron's cross entropy gets logits in ``dtype``."""
    import torch
    from megatron.core import tensor_parallel

    def make(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda logits, targets: loss(logits.to(getattr(torch, dtype)), targets).float()

    with Taps() as taps:
        taps.attribute(tensor_parallel, "vocab_parallel_cross_entropy", make)
        yield


@contextmanager
def positions(live: Live, order: str) -> Iterator[None]:
    """Positions in context-parallel "zigzag" order, or as a batch "padded" on the left counts them."""
    longest = max(len(s.token_ids) for s in live.plan.samples)

    def make(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(length: int, *args: Any, **kwargs: Any) -> Tensor:
            whole = forward(longest + length, *args, **kwargs)
            if order == "padded":
                first = longest - 1 - length
                return whole[first : first + length]
            return whole[zigzag_positions(length)]

        return run

    with Taps() as taps:
        taps.attribute(live.model.rotary_pos_emb, "forward", make)
        yield


@contextmanager
def rope_table(live: Live, *, theta: float = 0.0, index: int = -1) -> Iterator[None]:
    """The live inverse frequencies, of another ``theta``, or the one at ``index`` 1 ulp larger."""
    import torch

    rotary = live.model.rotary_pos_emb
    honest = rotary.inv_freq
    changed = honest.clone()
    if theta:
        size = 2 * honest.numel()
        changed = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if index >= 0:
        changed[index] = torch.nextafter(changed[index], torch.tensor(1.0))
    rotary.inv_freq = changed
    # Megatron remembers the angles of the last 32 lengths.
    type(rotary).forward.cache_clear()
    try:
        yield
    finally:
        rotary.inv_freq = honest
        type(rotary).forward.cache_clear()


@contextmanager
def attention(live: Live, *, scale: float = 1.0, sink: float | None = None) -> Iterator[None]:
    """Megatron's own attention with another softmax scale, or with a sink a head (its ``softmax_offset``)."""
    import torch

    with Taps() as taps:
        for layer in live.model.decoder.layers:
            core = layer.self_attention.core_attention
            taps.attribute(core, "softmax_scale", lambda honest: honest * scale)
            if sink is not None:
                offset = torch.full((core.num_attention_heads_per_partition,), sink)
                taps.attribute(core, "softmax_offset", lambda _, offset=offset: offset)  # type: ignore[misc]
        yield


@contextmanager
def no_mask(live: Live) -> Iterator[None]:
    """Attention looks at all positions, later ones too."""

    def opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (*args[:3], args[3].new_zeros(args[3].shape), *args[4:]), kwargs

    with Taps() as taps:
        for layer in live.model.decoder.layers:
            taps.input(layer.self_attention.core_attention, opened)
        yield


@contextmanager
def stale_tied_head(live: Live) -> Iterator[None]:
    """The tied head reads a copy of the embedding that an update has passed by."""
    stale = live.model.shared_embedding_or_output_weight().detach() * 1.015625

    with Taps() as taps:
        taps.attribute(live.model, "shared_embedding_or_output_weight", lambda _: lambda: stale)
        yield


@contextmanager
def batch_order(live: Live) -> Iterator[None]:
    """A micro-batch holds its sequences the other way round."""

    def make(score: Callable[..., None]) -> Callable[..., None]:
        return lambda batch, *args: score(batch[::-1], *args)

    with Taps() as taps:
        taps.attribute(live.adapter, "_score", make)
        yield
