"""Changes of an engine on a strict profile, vLLM or Megatron: one operator computes something else, everywhere.

The engine's own operator still runs first wherever it can, since a strict engine counts its operators and refuses to
report a run in which one was passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from diffcheck.base.bits import tensor_bits as bits_of
from diffcheck.base.bits import to_float32
from diffcheck.capture.live import Taps
from diffcheck.faults.changes.live import Live
from reference import operators as ops
from reference.checks import Float32Array

Tensor = Any


@contextmanager
def contract(live: Live, operator: str, fields: dict[str, Any]) -> Iterator[None]:
    """``operator`` follows its contract with other ``fields``."""
    contracts = live.operators.contracts
    honest = contracts[operator]
    contracts[operator] = honest.replace(fields)
    try:
        yield
    finally:
        contracts[operator] = honest


@contextmanager
def small_batches(live: Live, rows: int, fields: dict[str, Any]) -> Iterator[None]:
    """Projections of fewer than ``rows`` rows follow another contract."""
    own = live.operators
    honest = own.contracts["linear"]
    other = honest.replace(fields)

    def make(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any) -> Tensor:
            own.contracts["linear"] = other if x[..., 0].numel() < rows else honest
            try:
                return linear(x, *args)
            finally:
                own.contracts["linear"] = honest

        return run

    with _wrapped(live, "linear", make):
        yield


@contextmanager
def unrounded_sum(live: Live) -> Iterator[None]:
    """A norm after a residual add takes the sum before it was rounded."""
    own = live.operators
    last: list[Tensor] = []

    def remember(add: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, residual: Tensor) -> Tensor:
            total = add(x, residual)
            last[:] = total, x, residual
            return total

        return run

    def make(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
            honest = norm(x, weight, epsilon)
            if not last or x.data_ptr() != last[0].data_ptr():
                return honest
            fused = own.contracts["rms_norm"].replace({"rounding.sum": "float32"})
            rows = (_array(part).reshape(-1, x.shape[-1]) for part in last[1:])
            return _like(honest, ops.rms_norm(next(rows), _array(weight), epsilon, fused, next(rows)).output)

        return run

    with _wrapped(live, "residual_add", remember), _wrapped(live, "rms_norm", make):
        yield


@contextmanager
def frequency(live: Live, index: int) -> Iterator[None]:
    """The inverse frequency ``index`` of the RoPE table is 1 ulp larger."""

    def make(table: Callable[..., ops.RopeTable]) -> Callable[..., ops.RopeTable]:
        def run(positions: Tensor, dim: int, theta: float, *rest: Any) -> ops.RopeTable:
            honest = table(positions, dim, theta, *rest)
            off = np.nextafter(np.float32(theta ** (-2 * index / dim)), np.float32(1))
            angle = (positions.numpy().astype(np.float32) * off).astype(np.float64)
            cos, sin = honest.cos.copy(), honest.sin.copy()
            cos[:, index], sin[:, index] = np.cos(angle), np.sin(angle)
            return ops.RopeTable(cos, sin)

        return run

    with _wrapped(live, "rope_table", make):
        yield


@contextmanager
def attention(live: Live, scale: float = 1.0, sink: float | None = None) -> Iterator[None]:
    """Attention whose scores are ``scale`` times as large, or in which every head has a ``sink``."""
    own = live.operators

    def make(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(q: Tensor, positions: Any, kv: Any, factor: float | None, window: int | None = None) -> Tensor:
            honest = attend(q, positions, kv, factor, window)
            sinks = None if sink is None else np.full(q.shape[1], sink, np.float32)
            changed = (factor or 1 / float(np.sqrt(q.shape[2]))) * scale
            asked: dict[str, Any] = {"scale": changed, "sinks": sinks, "window": window}
            found = ops.attention(_array(q), positions, kv, own.contracts["attention"], **asked)
            return _like(honest, found)

        return run

    with _wrapped(live, "attention", make):
        yield


@contextmanager
def shaping(live: Live, **ignored: Any) -> Iterator[None]:
    """Logits are processed with ``ignored`` arguments (temperature, top_k, top_p) in place of the requested ones."""

    def make(process: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(logits: Tensor, temperature: float = 1.0, top_k: Any = None, top_p: Any = None) -> Tensor:
            asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            return process(logits, **{**asked, **ignored})

        return run

    with _wrapped(live, "processed_logits", make):
        yield


@contextmanager
def renormalised(live: Live, top_p: float) -> Iterator[None]:
    """The log-sum-exp runs over the top-p set alone: smaller by the logarithm of the kept mass."""
    own = live.operators

    def make(logsumexp: Callable[..., Any]) -> Callable[..., Any]:
        def run(logits: Tensor) -> Any:
            kept = ops.processed_logits(_array(logits), own.contracts["processed_logits"], top_p=top_p)
            return logsumexp(_like(logits, kept))

        return run

    with _wrapped(live, "logsumexp", make):
        yield


@contextmanager
def nondeterministic(live: Live) -> Iterator[None]:
    """The log-sum-exp adds in an order that is drawn anew at every call."""
    import torch

    def make(logsumexp: Callable[..., Any]) -> Callable[..., Any]:
        def run(logits: Tensor) -> Any:
            order = np.random.default_rng().permutation(logits.shape[-1])
            return logsumexp(logits[..., torch.from_numpy(order)].contiguous())

        return run

    with _wrapped(live, "logsumexp", make):
        yield


@contextmanager
def _wrapped(live: Live, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    with Taps() as taps:
        taps.attribute(live.operators, name, make)
        yield


def _array(tensor: Tensor) -> Float32Array:
    """The tensor's values, of its own shape."""
    flat = tensor.detach().reshape(1, -1)
    return np.ascontiguousarray(to_float32(*bits_of(flat)).reshape(tuple(tensor.shape)))


def _like(tensor: Tensor, values: Float32Array) -> Tensor:
    """``values``, which the tensor's dtype holds exactly, as such a tensor."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).to(tensor.dtype).reshape(tensor.shape)
