"""Rates of the matrix units, and their ratio to mmasim on the same operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from reference.benchmarks.measure import Measurement, best_times
from reference.checks import Float32Array
from reference.dot import UNITS, dot
from reference.formats import FORMATS
from reference.rounding import round_to

#: Least rates at 256 x 256 x 1024 with bfloat16 operands, in GFLOP/s; a multiplication and an addition count as two.
TARGETS = {"fma32-seq": 4.0, "mfma-cdna3-g8": 0.6, "hopper-k16": 0.9}
SHAPE = (256, 256, 1024)
#: mmasim needs seconds at the full size.
PEER_SHAPE = (64, 64, 256)
PEER_INSTRUCTIONS = {
    "mfma-cdna3-g8": ("CDNA3", "f32_32x32x8_bf16"),
    "mfma-cdna2": ("CDNA2", "f32_32x32x8bf16_1k"),
    "mfma-cdna1": ("CDNA1", "f32_32x32x4bf16"),
    "hopper-k16": ("Hopper", "m64n8k16.f32.bf16.bf16"),
    "ampere-k8": ("Ampere", "m16n8k16.f32.bf16.bf16.f32"),
}


def measurements() -> Iterator[Measurement]:
    """Every unit at the full size; then every unit that mmasim has, beside it."""
    for unit in UNITS:
        yield _measure(unit, "bfloat16", SHAPE, TARGETS.get(unit))
    yield _measure("fma32-seq", "float32", SHAPE, None)
    for unit, instruction in PEER_INSTRUCTIONS.items():
        peer = _mmasim(*instruction)
        if peer is not None:
            yield _beside_peer(unit, peer)


def _measure(unit: str, input_format: str, shape: tuple[int, int, int], target: float | None) -> Measurement:
    a, b = _operands(input_format, shape)
    seconds, cpu = best_times(partial(dot, a, b, unit=unit, input_format=input_format))
    rate = 2 * np.prod(shape) / cpu / 1e9
    return Measurement(f"dot {unit} {input_format}", _size(shape), seconds, cpu, float(rate), "GFLOP/s", target)


def _beside_peer(unit: str, peer: Callable[[Any, Any, Any], Any]) -> Measurement:
    import torch

    ours = _measure(unit, "bfloat16", PEER_SHAPE, None)
    a, b = (torch.from_numpy(x).bfloat16() for x in _operands("bfloat16", PEER_SHAPE))
    start = torch.zeros(PEER_SHAPE[0], PEER_SHAPE[1])
    _, cpu = best_times(partial(peer, a, b, start), repeats=3)
    ratio = cpu / ours.cpu_seconds
    return Measurement(
        ours.name, ours.size, ours.seconds, ours.cpu_seconds, ours.rate, ours.unit, None, "mmasim", ratio
    )


def _mmasim(architecture: str, instruction: str) -> Callable[[Any, Any, Any], Any] | None:
    """The simulator of one instruction, on one thread; None where mmasim is not installed."""
    try:
        import torch
        from mmasim.amd.sim import MFMA  # type: ignore[import-untyped]
        from mmasim.nv_ptx.sim import MMA, WGMMA  # type: ignore[import-untyped]
    except ImportError:
        return None
    torch.set_num_threads(1)
    kind = {"Hopper": WGMMA, "Ampere": MMA}.get(architecture, MFMA)
    simulator: Callable[[Any, Any, Any], Any] = kind(architecture, instruction)
    return simulator


def _operands(input_format: str, shape: tuple[int, int, int]) -> tuple[Float32Array, Float32Array]:
    rng = np.random.default_rng(0)
    M, N, K = shape
    a, b = (rng.standard_normal(size).astype(np.float32) for size in ((M, K), (K, N)))
    return round_to(a, FORMATS[input_format]), round_to(b, FORMATS[input_format])


def _size(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))
