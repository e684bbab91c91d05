"""Timing of a function, and the record that a benchmark writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """One line of a benchmark."""

    #: What ran, and on what size.
    name: str
    size: str
    #: Best wall-clock time of several runs, and best processor time, in seconds.
    seconds: float
    cpu_seconds: float
    #: Work per second of processor time, or another figure, and its unit.
    rate: float
    unit: str
    #: The rate the project promises; None where it promises none.
    target: float | None = None
    #: The peer on the same size in the same run: its name, and our rate over its rate.
    peer: str | None = None
    ratio: float | None = None
    #: Whether the target is a least rate, or a most.
    more_is_better: bool = True

    @property
    def reaches_target(self) -> bool:
        """Whether the rate is on the right side of the target, if there is one."""
        if self.target is None:
            return True
        return self.rate >= self.target if self.more_is_better else self.rate <= self.target


def best_times(function: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """Least wall-clock and least processor time of `repeats` runs after a warm-up, in seconds."""
    function()
    wall, cpu = [], []
    for _ in range(repeats):
        started, started_cpu = time.perf_counter(), time.process_time()
        function()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - started_cpu)
    return min(wall), min(cpu)
