"""A contest: a peer and ours on the same work, captured as CUDA graphs and replayed in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

#: Bytes that rotating operands must exceed: several times the L2 cache of 60 MB.
ROTATION = 250_000_000
COPIES = 24


@dataclass(frozen=True)
class Contest:
    """A peer and ours on the same work: each function takes the number of a copy of the operands."""

    name: str
    peer: str
    functions: dict[str, Callable[[int], Any]]
    copies: int
    #: Floating-point operations and least bytes of one call: what the ceilings are held against.
    operations: float
    bytes: float
    facts: dict[str, Any] = field(default_factory=dict)


def medians(contest: Contest, rounds: int, calls: int) -> dict[str, float]:
    """Median seconds of one call of each function, replayed in turns."""
    graphs = {}
    for name, function in contest.functions.items():
        for copy in range(2):
            function(copy % contest.copies)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(calls):
                function(call % contest.copies)
        graphs[name] = graph
        graph.replay()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3 / calls)
    return {name: statistics.median(values) for name, values in times.items()}
