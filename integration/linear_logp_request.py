"""What a linear-logp request of a Megatron training loop must be: checked field by field before anything is computed.

An orchestrator hands over structural objects, so nothing about them can be taken for granted. A request that
contradicts itself is a `RequestError`; one that is sound, and that no strict contract covers, is an `UnavailableError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from diffcheck.base.errors import RlkError
from integration.arrays import DTYPES

Tensor = Any
LAYOUTS = ("single", "zigzag", "allgather")


class RequestError(RlkError):
    """A request contradicts itself, or a field is missing or of the wrong kind: a fault of the caller, in any mode."""


class UnavailableError(RlkError):
    """A sound request that no strict contract covers. Where the caller allows it, it may compute natively."""

    #: What the caller looks for.
    linear_logp_provider_unavailable = True


@dataclass(frozen=True)
class Request:
    """A sound request. T tokens, V columns of this rank, H features.

    The layout of tokens over context-parallel ranks is checked and then of no account: every row is computed from
    itself alone, in whatever order rows come.
    """

    #: [T, V], float32; None where `hidden` and `weight` give them.
    logits: Tensor | None
    #: [T, H] and [V, H], both of the model's dtype; None where only logits are given.
    hidden: Tensor | None
    weight: Tensor | None
    #: int64, [T].
    targets: Tensor
    #: Tensor-parallel group, None for a group of one.
    group: Any
    #: Real columns over all ranks; padding comes after them.
    vocabulary: int
    #: Where `vocabulary` was said: context or metadata.
    vocabulary_from: str
    #: One a token.
    temperatures: list[float]
    #: bool, [T, V]; None keeps all.
    keep: Tensor | None
    entropy: bool
    entropy_grad: bool
    #: Rows that are taken together; at least 1.
    chunk: int

    @property
    def dtype(self) -> Any:
        """torch dtype of what is computed from."""
        return (self.logits if self.hidden is None else self.hidden).dtype  # type: ignore[union-attr]


def checked(request: Any) -> Request:
    """The request of an orchestrator, every field checked.

    Raises:
        RequestError: it contradicts itself.
        UnavailableError: no strict contract covers it.
    """
    logits = _tensor(request, "logits", "logits", 2)
    tokens, columns = logits.shape
    if not logits.is_floating_point():
        raise RequestError(f"request.logits is {logits.dtype}, wanted a floating dtype")
    targets = _tensor(request, "target_ids", "target_ids", 1)
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise RequestError(f"request.target_ids is {targets.dtype}, wanted integers")
    _same("target_ids", targets, (tokens,), logits)
    _layout(_field(request, "token_layout"))
    group, rank, ranks = _group(_field(request, "tensor_parallel_group"))
    metadata = _metadata(getattr(request, "metadata", None), rank, ranks)
    context = getattr(request, "context", None)
    vocabulary, source = _vocabulary(context, metadata, columns, rank, ranks)
    keep = getattr(request, "log_prob_keep_mask", None)
    if keep is not None:
        if not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool:
            raise RequestError("request.log_prob_keep_mask is no bool tensor")
        _same("log_prob_keep_mask", keep, (tokens, columns), logits)
    hidden, weight = (None, None) if context is None else _projection(context, logits)
    temperatures = _temperatures(getattr(request, "temperature", None), logits)
    chunk = _integer(_field(request, "chunk_size"), "chunk_size")
    flags = [_flag(request, name) for name in ("with_entropy", "with_entropy_grad")]
    _available(logits, hidden)
    if tokens and not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise RequestError(
            f"request.target_ids holds {int(targets.min())} to {int(targets.max())}, the vocabulary has {vocabulary}"
        )
    return Request(
        logits=logits if hidden is None else None,
        hidden=hidden,
        weight=weight,
        targets=targets.to(torch.int64),
        group=group,
        vocabulary=vocabulary,
        vocabulary_from=source,
        temperatures=temperatures,
        keep=keep,
        entropy=flags[0],
        entropy_grad=flags[1],
        chunk=chunk if chunk > 0 else max(1, tokens),
    )


def _field(owner: Any, name: str, where: str = "request") -> Any:
    if not hasattr(owner, name):
        raise RequestError(f"{where} has no field {name}", "pass every field of the interface")
    return getattr(owner, name)


def _tensor(owner: Any, name: str, label: str, dimensions: int, where: str = "request") -> Tensor:
    value = _field(owner, name, where)
    if not isinstance(value, torch.Tensor):
        raise RequestError(f"request.{label} is a {type(value).__name__}, wanted a tensor")
    if value.dim() != dimensions:
        raise RequestError(f"request.{label} has shape {tuple(value.shape)}, wanted {dimensions} dimensions")
    return value


def _same(label: str, value: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if tuple(value.shape) != shape:
        raise RequestError(f"request.{label} has shape {tuple(value.shape)}, wanted {shape}")
    if value.device != like.device:
        raise RequestError(f"request.{label} is on {value.device}, logits are on {like.device}")


def _integer(value: Any, label: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"request.{label} is {value!r}, wanted an integer")
    return value


def _flag(request: Any, name: str) -> bool:
    value = _field(request, name)
    if not isinstance(value, bool):
        raise RequestError(f"request.{name} is {value!r}, wanted True or False")
    return value


def _layout(layout: Any) -> None:
    size = _integer(_field(layout, "world_size", "token_layout"), "token_layout.world_size")
    rank = _integer(_field(layout, "rank", "token_layout"), "token_layout.rank")
    kind = _field(layout, "layout", "token_layout")
    if size < 1 or not 0 <= rank < size:
        raise RequestError(f"request.token_layout is rank {rank} of {size}")
    if kind not in LAYOUTS or (size == 1) != (kind == "single"):
        raise RequestError(
            f"request.token_layout.layout is {kind!r} with {size} ranks",
            "single for one rank; zigzag or allgather for several",
        )


def _group(group: Any) -> tuple[Any, int, int]:
    """(group or None, rank, size)."""
    if group is None:
        return None, 0, 1
    if not callable(getattr(group, "size", None)) or not callable(getattr(group, "rank", None)):
        raise RequestError(f"request.tensor_parallel_group is a {type(group).__name__}, wanted a process group or None")
    rank, size = int(group.rank()), int(group.size())
    if not 0 <= rank < size:
        raise RequestError(f"request.tensor_parallel_group: this process is rank {rank} of {size}")
    return (group if size > 1 else None), rank, size


def _metadata(metadata: Any, rank: int, ranks: int) -> Mapping[str, Any]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise RequestError(f"request.metadata is a {type(metadata).__name__}, wanted a mapping")
    for name, actual in (("tp_rank", rank), ("tp_world_size", ranks)):
        if metadata.get(name, actual) != actual:
            raise RequestError(f"request.metadata[{name!r}] is {metadata[name]!r}, the group says {actual}")
    return metadata


def _vocabulary(context: Any, metadata: Mapping[str, Any], columns: int, rank: int, ranks: int) -> tuple[int, str]:
    """(real columns over all ranks, where that was said)."""
    real, padded = metadata.get("real_vocab_size"), metadata.get("padded_vocab_size", columns * ranks)
    start, width, source = rank * columns, columns, "metadata"
    if context is not None:
        where, partition = "context.vocab_partition", _field(context, "vocab_partition", "context")
        names = ("real_size", "padded_size", "local_start", "local_size")
        real, padded, start, width = (_integer(_field(partition, n, where), f"{where}.{n}") for n in names)
        source = "context"
    if real is None:
        raise UnavailableError(
            "request says nowhere how many columns of the vocabulary are real: padding would enter the log-sum-exp",
            "pass context.vocab_partition, or metadata['real_vocab_size']",
        )
    real, padded = _integer(real, "real_vocab_size"), _integer(padded, "padded_vocab_size")
    if not 0 < real <= padded:
        raise RequestError(f"request: {real} real columns of {padded}")
    if width != columns:
        raise RequestError(f"request: vocab_partition.local_size is {width}, logits have {columns} columns")
    if start != rank * columns or padded != ranks * columns:
        raise UnavailableError(
            f"columns from {start}, {columns} wide, on rank {rank} of {ranks} do not tile {padded} columns evenly",
            "use equal shards in rank order, as Megatron does",
        )
    return real, source


def _projection(context: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    hidden = _tensor(context, "hidden", "context.hidden", 2, "context")
    projection = _field(context, "projection", "context")
    weight = _tensor(projection, "weight", "context.projection.weight", 2, "context.projection")
    _same("context.hidden", hidden, (logits.shape[0], hidden.shape[1]), logits)
    _same("context.projection.weight", weight, (logits.shape[1], hidden.shape[1]), logits)
    if hidden.dtype != weight.dtype:
        raise RequestError(f"request.context: hidden is {hidden.dtype}, projection.weight is {weight.dtype}")
    bias = getattr(projection, "bias", None)
    if bias is not None:
        if not isinstance(bias, torch.Tensor):
            raise RequestError(f"request.context.projection.bias is a {type(bias).__name__}, wanted a tensor or None")
        _same("context.projection.bias", bias, (logits.shape[1],), logits)
        raise UnavailableError("a head with a bias has no strict contract", "use a model without one")
    return hidden, weight


def _temperatures(value: Any, logits: Tensor) -> list[float]:
    tokens = int(logits.shape[0])
    if value is None:
        return [1.0] * tokens
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise RequestError("request.temperature requires a gradient: it is a setting, not a parameter")
        if value.numel() not in (1, tokens) or (value.numel() != 1 and value.dim() != 1) or value.is_complex():
            raise RequestError(f"request.temperature has shape {tuple(value.shape)}, wanted one value or one a token")
        if value.device != logits.device and value.numel() != 1:
            raise RequestError(f"request.temperature is on {value.device}, logits are on {logits.device}")
        found = [float(t) for t in value.detach().reshape(-1).tolist()]
        found = found * tokens if value.numel() == 1 else found
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = [float(value)] * tokens
    else:
        raise RequestError(f"request.temperature is {value!r}, wanted a number, a tensor or None")
    if any(not math.isfinite(t) or t <= 0 for t in found):
        raise RequestError("request.temperature is not above 0 and finite everywhere")
    return found


def _available(logits: Tensor, hidden: Tensor | None) -> None:
    """That a strict contract covers the device and dtype."""
    if logits.device.type != "cpu":
        raise UnavailableError(f"the strict operators of this provider run on a CPU, logits are on {logits.device}")
    dtype = str((logits if hidden is None else hidden).dtype).removeprefix("torch.")
    if hidden is None and dtype != "float32":
        raise UnavailableError(
            f"logits are {dtype}: rounded before the softmax, they are not those of the strict head, which are float32",
            "pass context, so that the head is computed here too; or float32 logits of the strict head",
        )
    if dtype not in DTYPES:
        raise UnavailableError(f"context.hidden is {dtype}; strict contracts exist for {', '.join(DTYPES)}")
