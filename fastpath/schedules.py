"""How matrix products are spread over programs. A schedule may depend on every size: it cannot change a bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fastpath.backend import Target


@dataclass(frozen=True)
class Schedule:
    """Tiles, and how many programs share the segments of one tile."""

    #: Rows and columns of the output tile of one program.
    tokens: int
    outputs: int
    #: Elements of K per step of the loop.
    k: int
    #: Neighbouring segments that one program adds up in registers; the others meet in a workspace.
    local: int = 1
    warps: int = 4
    stages: int = 3
    #: Weights as the left operand: few tokens then fill the short side of the matrix instruction.
    swap: bool = False
    #: One program per multiprocessor walks all tiles, fed by Hopper's bulk copies (TMA).
    persistent: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def schedule(target: Target, unit: str, tokens: int, outputs: int, segment: int, segments: int) -> Schedule:
    """The schedule of x [tokens, segments * segment] times weight [outputs, segments * segment]."""
    if target.runtime == "interpreter":
        return Schedule(tokens=16, outputs=64, k=32)
    if unit == "fma32-seq":
        return _float32(tokens, outputs, segments)
    return _matrix_unit(target, tokens, outputs, segment, segments)


def _float32(tokens: int, outputs: int, segments: int) -> Schedule:
    if tokens <= 32:
        return Schedule(tokens=16, outputs=32, k=64, warps=4, stages=3)
    return Schedule(tokens=64, outputs=64, k=32, local=segments, warps=4, stages=3)


def _matrix_unit(target: Target, tokens: int, outputs: int, segment: int, segments: int) -> Schedule:
    if tokens <= 64:
        return Schedule(tokens=max(16, power_of_two(tokens)), outputs=32, k=128, warps=4, stages=4)
    if target.runtime == "hip":
        return Schedule(tokens=128, outputs=128, k=64, local=min(segments, 2), warps=8, stages=2)
    if segments == 1:
        return Schedule(tokens=128, outputs=256, k=64, warps=8, stages=3, persistent=True)
    return Schedule(tokens=128, outputs=128, k=64, local=segments, warps=8, stages=4, persistent=True)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def fit(plan: Schedule, x: torch.Tensor, weight: torch.Tensor, segments: int, target: Target, unit: str) -> Schedule:
    """``plan`` made possible for these operands: bulk copies need bfloat16, 16-byte rows and whole steps of K."""
    plan = replace(plan, local=min(plan.local, segments))
    segment = x.shape[1] // segments
    bulk = (target.arch, unit) == ("sm_90", "hopper-k16") and all(
        t.dtype == torch.bfloat16 and t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0
        for t in (x, weight)
    )
    whole = segment % plan.k == 0 or segments == 1
    return plan if bulk and whole else replace(plan, persistent=False)
