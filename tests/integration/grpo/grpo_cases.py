"""Short real runs for the tests: the command in a process of its own, and what its folder says afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: A run whose steps are short: 16 samples of at most 6 tokens.
SMALL = """
prompts_per_step = 4
group_size = 4
max_tokens = 6
checkpoint_stride = 1
preflight_stride = 0
"""
_MODULES = {"rollout": "integration.grpo.workers.rollout", "trainer": "integration.grpo.workers.trainer"}


def command(out: Path, *options: str, config: str = SMALL) -> list[str]:
    """The command line of a run into ``out``; its configuration lies beside it."""
    file = out.with_suffix(".toml")
    file.write_text(config)
    return [sys.executable, "-m", "integration.grpo", "run", "--config", str(file), "--out", str(out), *options]


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def finish(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=500)


def records(out: Path) -> list[dict[str, Any]]:
    """Every step without its timings."""
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def steps_done(out: Path) -> int:
    path = out / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(what: Any, limit: float = 120.0) -> None:
    """Wait until ``what()`` is true."""
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def processes_of(driver: int, who: str) -> list[int]:
    """Live processes of a driver's actor: rollout or trainer, all ranks."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            line = (folder / "cmdline").read_bytes().decode().split("\0")
        except (OSError, ValueError):
            continue
        if parent == driver and _MODULES[who] in line:
            found.append(int(folder.name))
    return sorted(found)


def is_gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
