"""Logprobs and entropy of chosen tokens from hidden states or logits, by the strict operators, over vocabulary shards.

The arithmetic is that of `integration.megatron.plugin.logprobs`: the same operators in the same order, so the same
bits, whatever the shards and the chunks.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from integration.backends import Operators
from integration.linear_logp_request import Request, RequestError
from integration.megatron import functions

Tensor = Any


class Entropy(torch.autograd.Function):  # type: ignore[misc]
    """Processed logits [rows, vocabulary] -> entropy [rows] of their softmax, in nats."""

    @staticmethod
    def forward(ctx: Any, own: Operators, logits: Tensor) -> Tensor:
        lse = own.logsumexp(logits)
        value = own.entropy(logits, lse)
        ctx.save_for_backward(logits, lse.value, value)
        ctx.own = own
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.own.entropy_backward(grad.contiguous(), *ctx.saved_tensors)


def linear_logp(request: Request, own: Operators) -> tuple[Tensor, Tensor | None]:
    """Logprobs [tokens] and, if asked for, entropy [tokens]: float32, attached to what requires gradients.

    Bits depend neither on ``request.chunk`` nor on the number of ranks.

    Raises:
        RequestError: the mask leaves nothing of a row.
    """
    logits = request.logits
    if logits is None:
        logits = functions.Linear.apply(own, request.hidden, request.weight, None, "lm_head", request.group)
    parts = [
        _chunk(request, own, logits, slice(first, first + request.chunk))
        for first in range(0, len(request.temperatures), request.chunk)
    ]
    if not parts:
        # No tokens: nothing to compute, on any rank, and still part of the graph.
        empty = logits.sum(-1)
        return empty, (empty if request.entropy_grad else empty.detach()) if request.entropy else None
    logp = torch.cat([part for part, _ in parts])
    entropies = [entropy for _, entropy in parts if entropy is not None]
    return logp, torch.cat(entropies) if request.entropy else None


def _chunk(request: Request, own: Operators, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
    processed = _processed(request, own, logits[rows], request.temperatures[rows])
    if request.keep is not None:
        keep = torch.cat(functions.gather_ranks(request.keep[rows], request.group), dim=-1)[:, : request.vocabulary]
        if not bool(keep.any(dim=-1).all()):
            raise RequestError("request.log_prob_keep_mask keeps no column of some row")
        # As with top-k and top-p, no mask may hide a NaN: a row with one keeps it.
        processed = torch.where(keep | processed.isnan().any(dim=-1, keepdim=True), processed, -torch.inf)
    logp = functions.LogProb.apply(own, processed, request.targets[rows], lambda value: value)
    if not request.entropy:
        return logp, None
    return logp, Entropy.apply(own, processed if request.entropy_grad else processed.detach())


def _processed(request: Request, own: Operators, logits: Tensor, temperatures: list[float]) -> Tensor:
    """Rows of the same temperature are scaled together, then put back in order."""

    def scaled(rows: Tensor, temperature: float) -> Tensor:
        shaping = (temperature, None, None)
        return functions.ProcessedLogits.apply(own, rows, request.vocabulary, shaping, request.group)

    distinct = sorted(set(temperatures))
    if len(distinct) == 1:
        return scaled(logits, distinct[0])
    where = [torch.tensor([i for i, t in enumerate(temperatures) if t == one]) for one in distinct]
    parts = [scaled(logits[rows], one) for one, rows in zip(distinct, where, strict=True)]
    return torch.cat(parts)[torch.argsort(torch.cat(where))]


def contracts(request: Request, own: Operators) -> dict[str, str]:
    """Operator -> contract id, of all that the request needs."""
    names = ["processed_logits", "logsumexp", "logprob"]
    names += ["lm_head"] if request.logits is None else []
    names += ["entropy"] if request.entropy else []
    return {name: own.contracts[name].contract_id for name in sorted(names)}


def joint_id(profile: str, ids: dict[str, str]) -> str:
    """One contract id for several operators: the profile, and the SHA-256 of their ids as canonical JSON."""
    text = json.dumps(ids, sort_keys=True, separators=(",", ":"))
    return f"{profile}:{hashlib.sha256(text.encode()).hexdigest()}"
