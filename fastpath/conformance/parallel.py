"""Ranks in processes of their own: ``python -m fastpath.conformance.parallel [--ranks N] [--json OUT]``.

On GPUs, one each, over NCCL and over memory handles; in Triton's interpreter over gloo. Tensor parallelism of N must
give the bits of one rank, and those the bits of the reference. ``--one-gpu``: all ranks share a GPU, which takes turns
between their processes; NCCL refuses that, so only memory handles carry sums.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
import triton

from fastpath.backend import DTYPES, INTERPRETED, current_target
from fastpath.collectives.all_gather import all_gather
from fastpath.collectives.all_reduce import all_reduce
from fastpath.collectives.reduce_scatter import reduce_scatter
from fastpath.conformance.frame import Comparison, compare, to_device
from fastpath.conformance.inputs import values
from fastpath.hip.ipc import IpcAllReduce
from fastpath.products.linear import linear
from fastpath.products.row_linear import row_linear, row_linear_partial
from fastpath.rows.logsumexp import logsumexp
from reference import operators
from reference.contract.profiles import profile
from reference.files import write_atomically

#: tokens, outputs, inputs of the row-parallel layer; Qwen3-8B's o_proj on GPUs.
SHAPES = ((3, 16, 64),) if INTERPRETED else ((1, 4096, 4096), (64, 4096, 4096), (1024, 4096, 4096))


def comparisons(rank: int, ranks: int, one_gpu: bool) -> Iterator[Comparison]:
    """What one rank compares."""
    unit = current_target().units[-1]
    contracts: Any = profile(f"strict-v1/{unit}").contracts("float32" if INTERPRETED else "bfloat16")
    dtype = contracts["linear"].domain.input
    for tokens, outputs, inputs in SHAPES:
        x, w = values("wide", (tokens, inputs), dtype, 1), values("normal", (outputs, inputs), dtype, 2)
        a, b = to_device(x, DTYPES[dtype]), to_device(w, DTYPES[dtype])
        name = f"{tokens}x{outputs}x{inputs}"
        whole = row_linear(a, b, contracts["row_linear"])
        rows = [0, tokens - 1]
        expected = operators.row_linear(x[rows], w[:8], contracts["row_linear"])
        yield compare(f"{name} one rank", whole[rows][:, :8], expected)
        shard = slice(rank * inputs // ranks, (rank + 1) * inputs // ranks)
        own = (a[:, shard].contiguous(), b[:, shard].contiguous())
        partial = row_linear_partial(*own, contracts["row_linear"], ranks)
        if not INTERPRETED:
            yield from _handles(name, partial, contracts["all_reduce"], whole, 50 if one_gpu else 1000)
        if one_gpu:
            continue
        yield compare(f"{name} TP {ranks}", all_reduce(partial, contracts["all_reduce"]).to(whole.dtype), whole)
        columns = linear(a, b[rank * outputs // ranks : (rank + 1) * outputs // ranks], contracts["linear"])
        gathered = all_gather(columns, contracts["all_gather"])
        yield compare(f"{name} column parallel", gathered, linear(a, b, contracts["linear"]))
    if one_gpu:
        return
    parts = [values("wide", (2 * ranks, 12), "float32", r) for r in range(ranks)]
    scattered = operators.reduce_scatter(parts, contracts["reduce_scatter"])[rank]
    yield compare("reduce_scatter", reduce_scatter(to_device(parts[rank]), contracts["reduce_scatter"]), scattered)
    logits = values("normal", (3, 2048), "float32", 5)
    local = to_device(np.split(logits, ranks, axis=1)[rank])
    value = logsumexp(local, contracts["logsumexp"], dist.group.WORLD).value
    yield compare("logsumexp", value, operators.logsumexp(logits, contracts["logsumexp"]).value)


def _handles(name: str, partial: torch.Tensor, contract: Any, whole: torch.Tensor, times: int) -> Iterator[Comparison]:
    """The all-reduce over memory handles: against one rank's product, and many times against itself."""
    direct = IpcAllReduce(partial.numel())
    expected = direct(partial, contract)
    yield compare(f"{name} memory handles", expected.to(whole.dtype), whole)
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times):
        bad += (direct(partial, contract).view(torch.int32) != expected.view(torch.int32)).sum()
    yield Comparison(f"{name} memory handles, {times} times", times * partial.numel(), int(bad))
    direct.close()


def times(ranks: int) -> list[dict[str, Any]]:
    """Median microseconds of all-reduces of Qwen3-8B's hidden rows beside NCCL's, which adds in its own order."""
    contract: Any = profile("strict-v1").contract("all_reduce")
    results = []
    for tokens in (1, 64, 1024):
        x = torch.randn(tokens, 4096, device="cuda")
        direct = IpcAllReduce(x.numel())
        functions: dict[str, Callable[[], Any]] = {
            "nccl_us": lambda x=x: dist.all_reduce(x.clone()),  # type: ignore[misc]
            "gather_tree_us": lambda x=x: all_reduce(x, contract),  # type: ignore[misc]
            "handles_tree_us": lambda x=x, direct=direct: direct(x, contract),  # type: ignore[misc]
        }
        measured: dict[str, list[float]] = {key: [] for key in functions}
        for _ in range(60):
            for key, function in functions.items():
                dist.barrier()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                function()
                end.record()
                end.synchronize()
                measured[key].append(start.elapsed_time(end) * 1e3)
        direct.close()
        medians = {key: round(statistics.median(taken[10:]), 2) for key, taken in measured.items()}
        results.append({"ranks": ranks, "tokens": tokens, "features": 4096, **medians})
    return results


def _rank(rank: int, ranks: int, folder: str, one_gpu: bool) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if not INTERPRETED:
        torch.cuda.set_device(0 if one_gpu else rank)
    backend = "gloo" if INTERPRETED or one_gpu else "nccl"
    device = torch.device("cuda", rank) if backend == "nccl" else None
    dist.init_process_group(backend, f"file://{folder}/rendezvous", rank=rank, world_size=ranks, device_id=device)
    found = []
    for comparison in comparisons(rank, ranks, one_gpu):
        found.append(asdict(comparison) | {"rank": rank})
        print(f"rank {rank} {comparison.what:<44} {comparison.different} of {comparison.compared}", flush=True)
    timed = [] if INTERPRETED or one_gpu else times(ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps({"comparisons": found, "times": timed}))
    dist.destroy_process_group()


def run(ranks: int, timeout: float = 600.0, one_gpu: bool = False) -> dict[str, Any]:
    """Run ``ranks`` processes; the report as plain data. Raises what a rank raised.

    Raises:
        TimeoutError: ranks still wait for each other after ``timeout`` seconds; they are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.spawn(_rank, (ranks, folder, one_gpu), nprocs=ranks, join=False)
        _join(context, time.monotonic() + timeout)
        reports = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    gpus = 1 if one_gpu else ranks
    device = "Triton's interpreter" if INTERPRETED else f"{gpus} x {torch.cuda.get_device_name()}"
    found = [comparison for report in reports for comparison in report["comparisons"]]
    return {
        "command": " ".join(["python", "-m", "fastpath.conformance.parallel", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "summary": {
            "ranks": ranks,
            "compared": sum(c["compared"] for c in found),
            "different": sum(c["different"] for c in found),
        },
        "comparisons": found,
        "times": reports[0]["times"],
    }


def _join(context: Any, deadline: float) -> None:
    """Wait for all ranks: a kernel that waits for a rank that is gone would wait for ever."""
    while not context.join(timeout=1.0):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError("ranks still wait for each other: see the last comparison of each")


def main() -> int:
    """Run, print, write the report: 0 if every bit agrees."""
    parser = argparse.ArgumentParser(prog="python -m fastpath.conformance.parallel", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks share a GPU")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which ranks that wait are ended")
    arguments = parser.parse_args()
    report = run(arguments.ranks, arguments.timeout, arguments.one_gpu)
    for line in report["times"]:
        print(line)
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(report, indent=1) + "\n")
    return 1 if report["summary"]["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
