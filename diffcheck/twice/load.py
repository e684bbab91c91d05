"""Work that keeps a machine busy beside what is watched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Products too large for a core's cache: cores, caches and memory are all contended for.
_ON_CPU = """
import numpy as np
a = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
while True:
    a @ a
"""
_ON_GPU = """
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
while True:
    a @ a
    torch.cuda.synchronize()
"""


@contextmanager
def busy(device: str, processes: int | None = None) -> Iterator[int]:
    """Multiply matrices in other processes until the context ends.

    Args:
        device: "cpu" or "cuda".
        processes: default: one a core, or one on a GPU.

    Yields:
        How many processes there are.
    """
    count = processes or (os.cpu_count() or 1 if device == "cpu" else 1)
    code = _ON_CPU if device == "cpu" else _ON_GPU
    # One thread each: so many processes are the load that was asked for, whatever the library would start.
    environment = {**os.environ, **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL) for _ in range(count)
    ]
    try:
        yield count
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
