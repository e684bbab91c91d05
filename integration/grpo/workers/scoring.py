"""Logprobs of whole sequences from a live Megatron-core model, differentiable; strict or as Megatron computes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Tensor = Any


@dataclass(frozen=True)
class TokenSequence:
    """One sample as the trainer scores it."""

    id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    #: 1 for each response token that is learned from, 0 for the others; None: all.
    mask: tuple[int, ...] | None = None

    @property
    def learned(self) -> tuple[int, ...]:
        """The mask, written out."""
        return (1,) * len(self.response) if self.mask is None else self.mask

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TokenSequence:
        mask = data.get("mask")
        return cls(data["id"], tuple(data["prompt"]), tuple(data["response"]), None if mask is None else tuple(mask))


@dataclass(frozen=True)
class Shaping:
    """What the rollout did to its logits before it drew."""

    temperature: float
    top_k: int | None
    top_p: float | None
    #: Token ids that were never drawn: their logits are -inf.
    hidden: tuple[int, ...] = ()


def batches(count: int, size: int) -> Iterator[range]:
    """Consecutive numbers below ``count``, ``size`` at a time."""
    for first in range(0, count, size):
        yield range(first, min(first + size, count))


def response_logprobs(
    adapter: Any, sequences: Sequence[TokenSequence], shaping: Shaping, *, strict: bool
) -> list[Tensor]:
    """One forward of some sequences, right-padded.

    Args:
        adapter: `diffcheck.capture.megatron.Adapter`.

    Returns:
        One float32 tensor [response tokens] a sequence, in nats.
    """
    import torch

    ids = [sequence.prompt + sequence.response for sequence in sequences]
    width = max(map(len, ids)) - 1
    device = adapter.options.device
    rows = torch.tensor([list(row) + [0] * (width + 1 - len(row)) for row in ids], device=device)
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    positions = torch.arange(width, device=device).expand(len(ids), width)
    future = torch.ones(1, 1, width, width, dtype=torch.bool, device=device).triu(1)
    logits = _without(adapter.model(tokens, positions, future), shaping.hidden, adapter.rank)
    score = _strict if strict else _native
    values = score(adapter, logits, targets, shaping)
    spans = [(len(s.prompt) - 1, len(s.prompt) + len(s.response) - 1) for s in sequences]
    return [row[first:last] for row, (first, last) in zip(values, spans, strict=True)]


def _without(logits: Tensor, hidden: Sequence[int], rank: int) -> Tensor:
    """This rank's logits with -inf in the columns of ``hidden``, as vLLM's mask of allowed tokens leaves them."""
    if not hidden:
        return logits
    import torch

    first, width = rank * logits.shape[-1], logits.shape[-1]
    mask = torch.zeros(width, dtype=torch.bool, device=logits.device)
    mask[[token - first for token in hidden if first <= token < first + width]] = True
    return logits.masked_fill(mask, -float("inf"))


def _strict(adapter: Any, logits: Tensor, targets: Tensor, shaping: Shaping) -> Tensor:
    from integration.megatron import plugin

    return plugin.logprobs(
        adapter.model,
        logits,
        targets,
        vocabulary=adapter.config.vocab_size,
        temperature=shaping.temperature,
        top_k=shaping.top_k,
        top_p=shaping.top_p,
    )


def _native(adapter: Any, logits: Tensor, targets: Tensor, shaping: Shaping) -> Tensor:
    import torch
    from megatron.core import tensor_parallel

    processed = logits.float() / shaping.temperature
    width = processed.shape[-1]
    column = adapter.rank * width + torch.arange(width, device=processed.device)
    # Columns past the real vocabulary take no part in the softmax.
    processed = processed.masked_fill(column >= adapter.config.vocab_size, -float("inf"))
    return -tensor_parallel.vocab_parallel_cross_entropy(processed, targets)
