"""How matrix products are spread over programs. A schedule may depend on every size: it cannot change a bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    #: A few programs per multiprocessor walk all tiles, fed by Hopper's bulk copies (TMA).
    persistent: bool = False
    residents: int = 1
    #: Copy both operands to float32 with K as the slow axis first: vector loads then run along rows.
    k_major: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


_as_if: list[int] = []


@contextmanager
def as_if(tokens: int) -> Iterator[None]:
    """Schedules of ``tokens`` tokens whatever their number: to run a large shape's code on a small one."""
    _as_if.append(tokens)
    try:
        yield
    finally:
        _as_if.pop()


def schedule(target: Target, unit: str, tokens: int, outputs: int, segment: int, segments: int) -> Schedule:
    """The schedule of x [tokens, segments * segment] times weight [outputs, segments * segment].

    The choices for Hopper are the winners of `python -m fastpath.benchmarks --tune` on an H200; those for gfx942 are
    checked in compiled code only.
    """
    if _as_if:
        tokens = _as_if[-1]
    if target.runtime == "interpreter":
        return Schedule(tokens=16, outputs=64, k=32)
    if unit == "fma32-seq":
        return _float32(tokens, segment, segments)
    if target.runtime == "hip":
        return _matrix_gfx942(tokens, segments)
    if tokens <= 64:
        return _few_on_hopper(tokens, outputs, segment * segments, segments)
    return _many_on_hopper(tokens, outputs, segment * segments, segments)


def _float32(tokens: int, segment: int, segments: int) -> Schedule:
    if tokens <= 32:
        return Schedule(16, 32, 64)
    if tokens <= 128:
        return Schedule(64, 64, 32 if segment % 32 == 0 else 16)
    return Schedule(64, 128, 16, local=min(segments, 2), k_major=True)


def _matrix_gfx942(tokens: int, segments: int) -> Schedule:
    if tokens <= 64:
        return Schedule(max(16, power_of_two(tokens)), 32, 128, stages=2)
    return Schedule(128, 128, 64, local=min(segments, 2), warps=8, stages=2)


def _few_on_hopper(tokens: int, outputs: int, inputs: int, segments: int) -> Schedule:
    """Weights are read once: what counts is that enough copies are in flight on every multiprocessor."""
    rows = max(8, power_of_two(tokens))
    if segments > 1:
        if tokens <= 16:
            return Schedule(rows, 64, 128, local=2 if inputs >= 8192 else 1, stages=4, swap=True)
        if outputs >= 2048:
            return Schedule(64, 32, 256, local=8, stages=4, persistent=True)
        if inputs <= 2048:
            return Schedule(64, 32, 128, local=2, stages=4, persistent=True, residents=2)
        return Schedule(rows, 64, 128, stages=4, swap=True, persistent=True, residents=2)
    narrow = outputs // 64 < 80  # tiles of 64 outputs would leave multiprocessors idle
    if tokens <= 16:
        if narrow:
            return Schedule(16, 32, 128, stages=5)
        return Schedule(rows, 64, 256 if inputs >= 2048 and outputs <= 8192 else 128, stages=4, swap=True)
    if narrow:
        return Schedule(64, 32, 256, stages=4, persistent=True)
    return Schedule(rows, 64, 128, stages=6, swap=True, persistent=True)


def _many_on_hopper(tokens: int, outputs: int, inputs: int, segments: int) -> Schedule:
    """Tensor cores are the limit: tiles as large as fill the multiprocessors, waiting sums in registers."""
    medium = tokens <= 512
    if segments == 1:
        if not medium or outputs >= 65536:
            return Schedule(128, 256, 64, warps=8, stages=4, persistent=True)
        if -(-tokens // 64) * -(-outputs // 128) <= 132:  # one tile each
            return Schedule(64, 128, 128, stages=4, persistent=True)
        return Schedule(128, 128, 64, warps=8, stages=6, persistent=True)
    if outputs >= 2048:
        if tokens <= 128:
            return Schedule(64, 64, 128, local=8, stages=6, persistent=True)
        return Schedule(128, 128, 64, local=4, warps=8, stages=6, persistent=True)
    if not medium:
        return Schedule(64, 64, 64, local=8, stages=6, persistent=True, residents=2)
    if inputs <= 2048:
        return Schedule(64, 32, 256, local=8, stages=4, persistent=True)
    return Schedule(64, 64, 128, local=2, stages=3, persistent=True, residents=2)


def candidates(target: Target, unit: str, tokens: int, segments: int) -> list[Schedule]:
    """Schedules worth measuring for so many tokens; all of them give the same bits."""
    local = [n for n in (1, 2, 4, 8) if n <= segments]
    if unit == "fma32-seq":
        plans = [Schedule(16, 32, 64), Schedule(64, 64, 32)]
        tiles = ((128, 128, 16, 8), (64, 128, 16, 4), (128, 128, 16, 4), (128, 64, 16, 4))
        plans += [Schedule(m, n, k, warps=w, k_major=True) for m, n, k, w in tiles]
        return [replace(plan, local=n) for plan in plans for n in local[:2]]
    if tokens <= 64:
        few = _few_tokens(target, power_of_two(tokens))
        return [replace(plan, local=n) for plan in few for n in local if plan.persistent or n <= 2]
    plans = [Schedule(64, 128, 64, warps=4, stages=3), Schedule(128, 128, 64, warps=8, stages=3)]
    if target.arch == "sm_90":
        plans += [
            Schedule(m, n, 64, warps=warps, stages=stages, persistent=True, residents=residents)
            for m, n, warps, stages, residents in (
                (128, 256, 8, 3, 1),
                (128, 256, 8, 4, 1),
                (256, 128, 8, 3, 1),
                (128, 128, 8, 4, 1),
                (128, 128, 4, 3, 2),
                (128, 64, 4, 4, 2),
                (64, 128, 4, 4, 2),
                (64, 256, 4, 4, 1),
                (128, 64, 8, 4, 2),
                (128, 128, 8, 6, 1),
                (64, 64, 4, 6, 2),
                (64, 256, 4, 5, 1),
            )
        ]
        plans += [
            Schedule(64, outputs, k, stages=stages, persistent=True, residents=residents)
            for outputs, k, stages, residents in ((128, 128, 4, 1), (64, 128, 3, 2), (64, 128, 6, 1), (32, 256, 4, 1))
        ]
    # a sum that waits takes as many registers as the accumulators: three of them wait for the eighth segment
    return [
        replace(plan, local=n)
        for plan in plans
        for n in local
        if n == 1 or (plan.persistent and plan.tokens * plan.outputs <= (2048 if n < 8 else 1024) * plan.warps)
    ]


def _few_tokens(target: Target, tokens: int) -> list[Schedule]:
    rows = max(16, tokens)
    plans = [
        Schedule(rows, outputs, k, warps=warps, stages=stages)
        for outputs, k, warps, stages in (
            (16, 128, 2, 5),
            (16, 256, 2, 4),
            (16, 256, 4, 4),
            (32, 128, 4, 5),
            (32, 256, 4, 4),
            (64, 128, 4, 5),
        )
    ]
    plans += [Schedule(max(8, tokens), 64, k, warps=4, stages=4, swap=True) for k in (128, 256)]
    if target.arch == "sm_90":
        plans += [
            Schedule(rows, outputs, k, warps=warps, stages=stages, persistent=True, residents=residents)
            for outputs, k, warps, stages, residents in (
                (16, 256, 4, 6, 3),
                (32, 128, 4, 6, 3),
                (32, 256, 4, 5, 2),
                (64, 128, 4, 5, 2),
                (32, 256, 4, 4, 1),
            )
        ]
        plans += [
            Schedule(max(8, tokens), 64, k, warps=4, stages=stages, swap=True, persistent=True, residents=residents)
            for k, stages, residents in ((64, 6, 3), (128, 4, 2), (128, 6, 1))
        ]
    return plans


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
    if plan.persistent and not (bulk and whole):
        return pointers(plan)
    if unit == "fma32-seq" and weight.stride(1) != 1 and not plan.k_major:
        return replace(plan, k=16)
    return plan


def pointers(plan: Schedule) -> Schedule:
    """A persistent ``plan`` without bulk copies: pointers take the registers that these leave free."""
    return replace(
        plan,
        outputs=min(plan.outputs, 128),
        local=1,
        warps=8 if plan.outputs > 64 else 4,
        stages=3,
        persistent=False,
        residents=1,
    )
