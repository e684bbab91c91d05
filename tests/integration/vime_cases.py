"""The stated interface of vime's hook points from the caller's side: its requests, and its rules for a provider.

``python -m tests.integration.vime_cases RANK RANKS FOLDER`` is one tensor-parallel rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tensor = Any


@dataclass
class Layout:
    world_size: int = 1
    rank: int = 0
    layout: str = "single"


@dataclass
class Projection:
    weight: Tensor
    bias: Tensor = None


@dataclass
class Partition:
    local_start: int
    local_size: int
    real_size: int
    padded_size: int


@dataclass
class Context:
    hidden: Tensor
    projection: Projection
    vocab_partition: Partition


@dataclass
class Call:
    """A request."""

    logits: Tensor
    target_ids: Tensor
    tensor_parallel_group: Any = None
    token_layout: Any = field(default_factory=Layout)
    with_entropy: bool = False
    with_entropy_grad: bool = False
    chunk_size: int = -1
    log_prob_keep_mask: Tensor = None
    context: Any = None
    temperature: Any = None
    metadata: Any = field(default_factory=lambda: {"real_vocab_size": REAL})


#: Tokens, features, columns with padding and without.
TOKENS, HIDDEN, PADDED, REAL = 13, 32, 48, 41


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits_call(ranks: int = 1, rank: int = 0, **changes: Any) -> Call:
    """Logits of this rank, as leaves."""
    width = PADDED // ranks
    logits = (4 * numbers(1, TOKENS, PADDED))[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    targets = torch.randint(REAL, (TOKENS,), generator=torch.Generator().manual_seed(2))
    return Call(**{"logits": logits, "target_ids": targets, **changes})


def hidden_call(ranks: int = 1, rank: int = 0, dtype: Any = torch.bfloat16, **changes: Any) -> Call:
    """Hidden states and this rank's rows of the head, as leaves; logits are of no use but their shape."""
    width = PADDED // ranks
    hidden = numbers(3, TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = numbers(4, PADDED, HIDDEN).to(dtype)[rank * width : (rank + 1) * width].clone().requires_grad_()
    context = Context(hidden, Projection(weight), Partition(rank * width, width, REAL, PADDED))
    return logits_call(ranks, rank, context=context, metadata={}, **changes)


class NativeError(Exception):
    """The caller went to its native path."""


def as_vime(provider: Callable[[Any], Any], call: Call, mode: str) -> Mapping[str, Any]:
    """What vime does with a provider: where it goes native, where it fails, and what it demands of a result."""
    try:
        result = provider(call)
    except Exception as error:
        unavailable = isinstance(error, ImportError | AttributeError)
        unavailable = unavailable or getattr(error, "linear_logp_provider_unavailable", False)
        if unavailable and mode == "auto":
            raise NativeError from error
        raise
    tokens = call.logits.shape[0]
    assert result["logp"].shape == (tokens, 1) and result["logp"].is_floating_point()
    assert result["logp"].device == call.logits.device
    assert (result["entropy"] is not None) == call.with_entropy
    if call.with_entropy:
        assert result["entropy"].shape == (tokens,)
        assert result["entropy"].requires_grad == call.with_entropy_grad
    assert result["backend_id"] and result["contract_id"] and result["provenance"]
    assert result["logp"].requires_grad
    return result  # type: ignore[no-any-return]


SHARED: dict[str, Any] = {"with_entropy": True, "with_entropy_grad": True, "chunk_size": 4, "temperature": 0.7}


def backward(call: Call, result: Mapping[str, Any]) -> dict[str, Tensor]:
    """Gradients of a weighted sum of logprobs and entropies, by name."""
    weights = numbers(5, TOKENS)
    (result["logp"][:, 0] * weights + result["entropy"] * weights.flip(0)).sum().backward()
    if call.context is None:
        return {"logits": call.logits.grad}
    return {"hidden": call.context.hidden.grad, "weight": call.context.projection.weight.grad}


def main(rank: int, ranks: int, folder: Path) -> None:
    import torch.distributed as dist

    from integration.vime import strict_linear_logp

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    width = PADDED // ranks
    keep = numbers(6, TOKENS, PADDED) > -1
    for name, make in (("logits", logits_call), ("hidden", hidden_call)):
        for masked in (False, True):
            mask = keep[:, rank * width : (rank + 1) * width] if masked else None
            call = make(ranks, rank, tensor_parallel_group=dist.group.WORLD, log_prob_keep_mask=mask, **SHARED)
            result = as_vime(strict_linear_logp, call, "strict")
            values = {"logp": result["logp"].detach(), "entropy": result["entropy"].detach()}
            grads = {f"d{key}": value for key, value in backward(call, result).items()}
            found[f"{name} {masked}"] = {**values, **grads, "contract_id": result["contract_id"]}
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    assert os.environ["RLK_PROFILE"]
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
