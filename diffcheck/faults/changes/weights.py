"""Weights that are not those the other side has: loaded the way each engine's users load them, or changed in place."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from diffcheck.capture.live import Taps, flip_bits
from diffcheck.faults.changes.live import Live
from diffcheck.faults.changes.vllm import fill_cache

Tensor = Any
#: What one step of training does to a weight here: large enough that bfloat16 keeps it.
_STEP = 1.015625


def last_step(live: Live, patterns: list[str]) -> list[tuple[str, Tensor]]:
    """(HF name, weight before the last update) of the weights whose names match."""
    names = [name for name in live.checkpoint if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return [(name, (live.checkpoint[name].float() * _STEP).to(live.checkpoint[name].dtype)) for name in names]


@contextmanager
def stale(live: Live, patterns: list[str]) -> Iterator[None]:
    """Weights whose names match are those of the last step: an update that left them out, or put them back."""
    with _loaded(live, last_step(live, patterns)):
        yield


@contextmanager
def sent_again(live: Live) -> Iterator[None]:
    """All weights, sent to the live engine once more: an update that changes nothing."""
    live.load([(name, live.checkpoint[name]) for name in live.checkpoint])
    yield


@contextmanager
def torn(live: Live, name: str) -> Iterator[None]:
    """vLLM is sent one weight of a module that holds several: what it does with the others is its own affair."""
    live.send([(name, live.checkpoint[name])])
    try:
        yield
    finally:
        live.load([(name, live.checkpoint[name])])
        # What the undefined weights made may be NaN, and would be read by later requests.
        fill_cache(live, 0.0)


@contextmanager
def flipped(live: Live, name: str, index: int, bit: int = 0) -> Iterator[None]:
    """One bit of a live weight, which nobody was told of: behind the engine's back, not through its loader."""
    import torch

    if live.options.engine == "megatron":
        changed = flip_bits(name, live.checkpoint[name], [(name, index, bit)])
        with _loaded(live, [(name, changed)]):
            yield
        return
    module = live.model.get_submodule(name.removesuffix(".weight"))
    honest = module.rlk_weight
    changed = flip_bits(name, torch.from_numpy(honest.copy(order="K")), [(name, index, bit + 16)])
    module.rlk_weight = changed.numpy()
    try:
        yield
    finally:
        module.rlk_weight = honest


@contextmanager
def adapter(live: Live, name: str, merge: str) -> Iterator[None]:
    """A low-rank adapter of rank 4 merged into one weight: W + B A, in float32 and rounded once, or in bfloat16
    throughout.
    """
    import torch

    weight = live.checkpoint[name]
    generator = torch.Generator().manual_seed(9)
    up = torch.randn(weight.shape[0], 4, generator=generator) * 0.05
    down = torch.randn(4, weight.shape[1], generator=generator) * 0.05
    dtype = getattr(torch, merge)
    merged = weight.to(dtype) + up.to(dtype) @ down.to(dtype)
    with _loaded(live, [(name, merged.to(weight.dtype))]):
        yield


@contextmanager
def swapped(live: Live, first: str, second: str) -> Iterator[None]:
    """A mapping that takes one weight for the other."""
    with _loaded(live, [(first, live.checkpoint[second]), (second, live.checkpoint[first])]):
        yield


@contextmanager
def not_interleaved(live: Live, layer: int) -> Iterator[None]:
    """Megatron's fused projection holds [q; k; v], not [q; k; v] of each key-value group in turn."""
    import torch

    parameter = live.model.get_parameter(f"decoder.layers.{layer}.self_attention.linear_qkv.weight")
    honest = parameter.detach().clone()
    parts = [live.checkpoint[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv"]
    with torch.no_grad():
        parameter.copy_(torch.cat(parts))
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(honest)


@contextmanager
def stale_tied_head(live: Live) -> Iterator[None]:
    """vLLM's tied head holds a copy of the embedding that an update has passed by."""
    import torch

    head = live.model.lm_head
    honest = head.weight
    head.weight = torch.nn.Parameter(honest.detach() * _STEP, requires_grad=False)
    try:
        yield
    finally:
        head.weight = honest


@contextmanager
def cached_prefixes(live: Live, stale: bool) -> Iterator[None]:
    """vLLM has all prompts in its prefix cache when the capture begins; with ``stale``, as the last step's weights made
    them, since an update did not drop them.
    """
    engine = live.adapter.llm.llm_engine
    folder = Path(tempfile.mkdtemp(prefix="rlk-warm-"))
    old = last_step(live, ["*.self_attn.?_proj.weight"]) if stale else []
    try:
        with _loaded(live, old):
            live.adapter.capture(replace(live.plan, out=folder / "warm"), live.progress)
        with Taps() as taps:
            taps.attribute(engine, "reset_prefix_cache", lambda _: lambda *args, **kwargs: True)
            yield
    finally:
        engine.reset_prefix_cache()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _loaded(live: Live, weights: list[tuple[str, Tensor]]) -> Iterator[None]:
    """``weights`` in the live engine; afterwards the checkpoint's."""
    if not weights:
        yield
        return
    honest = [(name, live.checkpoint[name]) for name, _ in weights]
    live.load(weights)
    try:
        yield
    finally:
        live.load(honest)
