"""Time of a strict GRPO step against a native one: ``python -m integration.grpo.benchmarks``.

The arms take turns in processes of their own; each phase counts with its fastest step, so that other work on the
machine disturbs the ratio least. Preflight and checkpoints are left out: they do not happen at every step.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diffcheck.base.files import write_text
from diffcheck.capture.adapter import package_versions
from diffcheck.cli import guard
from integration.grpo.config import GrpoConfig
from integration.grpo.evidence import PACKAGES
from integration.grpo.loop import Run
from integration.grpo.workers.engines import open_process

RESULTS = Path(__file__).parent.parent / "results" / "grpo-bench.json"
ARMS = ("native", "strict")
#: What the ratios are of: phases of a step.
PARTS = {
    "rollout": ("rollout",),
    "training": ("recompute", "update"),
    "sync": ("sync",),
    "step": ("rollout", "reward", "recompute", "update", "sync"),
}
#: Targets of the ratios.
LIMITS = {"rollout": 4.0, "training": 3.0, "step": 3.0}


def measure(mode: str, steps: int) -> list[dict[str, float]]:
    """Seconds of each part, a step each; the first step, which compiles and warms up, is left out."""
    with tempfile.TemporaryDirectory(prefix="rlk-bench-") as folder:
        config = GrpoConfig(mode=mode, steps=steps + 1, preflight_stride=0, checkpoint_stride=10**6)
        records = Run(config, Path(folder) / mode, open_process).run()[1:]
    return [{part: sum(r["seconds"][p] for p in phases) for part, phases in PARTS.items()} for r in records]


def benchmark(
    out: Annotated[Path, typer.Option("--json", help="Where the result goes.")] = RESULTS,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of each arm, in each round.")] = 12,
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 2,
) -> None:
    """Both arms in turn, the ratios, and where the time goes."""
    console = Console()
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in ARMS}
    for _ in range(rounds):
        for mode in ARMS:
            found[mode] += measure(mode, steps)
    seconds: dict[str, dict[str, dict[str, float]]] = {
        mode: {
            part: {
                "fastest": round(min(step[part] for step in rows), 4),
                "median": round(statistics.median(step[part] for step in rows), 4),
            }
            for part in PARTS
        }
        for mode, rows in found.items()
    }
    ratios = {part: round(seconds["strict"][part]["fastest"] / seconds["native"][part]["fastest"], 2) for part in PARTS}
    config = GrpoConfig()
    result: dict[str, Any] = {
        "schema": 1,
        "command": "make bench-grpo",
        "versions": package_versions(*PACKAGES) | {"python": platform.python_version()},
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)},
        "batch": {
            "model": config.model,
            "samples": config.prompts_per_step * config.group_size,
            "response_tokens": config.max_tokens,
            "epochs": config.epochs,
            "kl": config.kl_coef > 0,
        },
        "steps": steps * rounds,
        "seconds": seconds,
        "ratios": ratios,
        "limits": LIMITS,
    }
    write_text(out, json.dumps(result, indent=1) + "\n")
    for part, ratio in ratios.items():
        native, strict = (seconds[mode][part]["fastest"] for mode in ARMS)
        limit = f"at most {LIMITS[part]:.0f}" if part in LIMITS else ""
        console.print(
            f"{part:9} native {native:7.3f} s  strict {strict:7.3f} s  {ratio:5.2f}x  {limit}", highlight=False
        )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(benchmark)
    sys.exit(guard(lambda: app(standalone_mode=False)))
