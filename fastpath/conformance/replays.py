"""The row kernels and attention of one layer, replayed from a CUDA graph and repeated: the same bits every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fastpath.attention.attention import Packed, Pages, attention
from fastpath.attention.attention_backward import attention_backward
from fastpath.backend import ON_CPU, current_target
from fastpath.conformance.attention import paged
from fastpath.conformance.frame import Case, Comparison, compare, to_device
from fastpath.conformance.inputs import values
from fastpath.rows.embedding import embedding_backward
from fastpath.rows.qk_norm import qk_norm
from fastpath.rows.rms_norm import rms_norm, rms_norm_backward
from fastpath.rows.rope import rope, rope_table
from fastpath.rows.swiglu import swiglu
from reference.contract.profiles import profile
from reference.gradients import gradient_contract

REPEATS = 1000
HEADS, KV_HEADS, HEAD_DIM, TOKENS = 8, 2, 128, 96


def cases() -> Iterator[Case]:
    """Only on a device: the interpreter has no graphs, and no schedule that could vary."""
    if not ON_CPU:
        unit = current_target().units[-1]
        yield Case("replays/forward", partial(_replays, _forward(unit)), unit)
        yield Case("replays/decode", partial(_replays, _decode(unit)), unit)
        yield Case("replays/gradients", partial(_replays, _gradients(unit)), unit)


def _contract(operator: str, unit: str = "fma32-seq") -> Any:
    return profile(f"strict-v1/{unit}").contract(operator)


def _gradient(operator: str, unit: str = "fma32-seq") -> Any:
    return gradient_contract(_contract(operator, unit))


def _random(*shape: int, seed: int) -> torch.Tensor:
    return to_device(values("normal", shape, "bfloat16", seed), torch.bfloat16)


def _starts(*counts: int) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int().cuda()


def _forward(unit: str) -> Callable[[], list[torch.Tensor]]:
    hidden = HEADS * HEAD_DIM
    x, residual, weight, head_weight = (
        _random(*s, seed=i) for i, s in enumerate([(TOKENS, hidden)] * 2 + [(hidden,), (HEAD_DIM,)])
    )
    k, v = (_random(TOKENS, KV_HEADS, HEAD_DIM, seed=i) for i in (8, 9))
    rotation = _contract("rope")
    table, positions = rope_table(TOKENS, HEAD_DIM, 1e6, rotation, "cuda"), torch.arange(TOKENS).cuda()
    kv, starts = Packed(k, v, _starts(40, 56)), _starts(40, 56)

    def run() -> list[torch.Tensor]:
        normed, total = rms_norm(x, weight, 1e-6, _contract("rms_norm"), residual)
        assert total is not None
        q = qk_norm(normed.view(TOKENS, HEADS, HEAD_DIM), head_weight, 1e-6, _contract("qk_norm"))
        q = rope(q, positions, table, rotation)
        attended = attention(q, starts, 56, kv, _contract("attention", unit)).output
        return [normed, total, q, attended, swiglu(attended.view(TOKENS, -1), total, _contract("swiglu"))]

    return run


def _decode(unit: str) -> Callable[[], list[torch.Tensor]]:
    lengths = (700, 64, 1, 333)
    k, v = (values("normal", (sum(lengths), KV_HEADS, HEAD_DIM), "bfloat16", seed) for seed in (1, 2))
    pages: Pages = paged(k, v, lengths, 48, "bfloat16", 3)
    q, starts = _random(len(lengths), HEADS, HEAD_DIM, seed=4), _starts(*[1] * len(lengths))
    return lambda: [attention(q, starts, 1, pages, _contract("attention", unit)).output]


def _gradients(unit: str) -> Callable[[], list[torch.Tensor]]:
    q, dy = (_random(TOKENS, HEADS, HEAD_DIM, seed=seed) for seed in (1, 2))
    k, v = (_random(TOKENS, KV_HEADS, HEAD_DIM, seed=seed) for seed in (3, 4))
    starts, of = _starts(40, 56), _contract("attention", unit)
    kv, rows, weight = Packed(k, v, starts), dy.view(TOKENS, -1), _random(HEADS * HEAD_DIM, seed=5)
    ids = torch.arange(TOKENS).cuda() % 7

    def run() -> list[torch.Tensor]:
        result = attention(q, starts, 56, kv, of, save=True)
        back = attention_backward(dy, q, starts, 56, kv, 56, result, _gradient("attention", unit))
        norm = rms_norm_backward(rows, q.view(TOKENS, -1), weight, 1e-6, _gradient("rms_norm"))
        return [*back, *norm, embedding_backward(rows, ids, 9, _gradient("embedding"))]

    return run


def _replays(run: Callable[[], list[torch.Tensor]]) -> Iterator[Comparison]:
    expected = [part.clone() for part in run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for part in captured:
        part.zero_()
    graph.replay()
    for index, (got, want) in enumerate(zip(captured, expected, strict=True)):
        yield compare(f"result {index} of a replayed graph", got, want)
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        graph.replay()
        for got, want in zip(captured, expected, strict=True):
            patterns = torch.int16 if got.dtype == torch.bfloat16 else torch.int32
            changed += (got.view(patterns) != want.view(patterns)).sum()
    elements = sum(part.numel() for part in expected)
    yield Comparison(f"{REPEATS} repeats", REPEATS * elements, int(changed))
