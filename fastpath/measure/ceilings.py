"""What bounds every kernel on this device: the bandwidth of a copy, and the rate of the vendor's matrix product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

BYTES = 1 << 30
ROUNDS = 20


def measure_ceilings() -> dict[str, Any]:
    """Medians over `ROUNDS` runs: bytes read and written a second, and floating-point operations a second."""
    source = torch.empty(BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source))
    report: dict[str, Any] = {
        "copy": {"bytes": 2 * BYTES, "terabytes_per_second": round(2 * BYTES / seconds / 1e12, 3)}
    }
    for name, dtype, size in (
        ("bfloat16", torch.bfloat16, 8192),
        ("float16", torch.float16, 8192),
        ("float32", torch.float32, 4096),
    ):
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        seconds = _seconds(partial(torch.mm, a, b))
        rate = round(2 * size**3 / seconds / 1e12, 2)
        report[f"torch.mm {name}"] = {"size": size, "teraflop_per_second": rate}
    return report


def _seconds(run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)
