"""What every result states: the device, the releases and the command that made it."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from diffcheck.base.files import write_text

#: One vLLM in this process; nothing is asked of a network.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}


def prepare_environment() -> None:
    """Set `ENVIRONMENT` where the user has set nothing."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def facts() -> dict[str, Any]:
    """Device, driver, releases and command line."""
    import torch

    found: dict[str, Any] = {"command": "python -m " + " ".join(_command()), "python": platform.python_version()}
    for package in ("torch", "triton", "vllm", "megatron-core", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["runtime"] = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    return found


def _command() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [spec.name if spec else sys.argv[0], *sys.argv[1:]]


def write(path: Path, result: dict[str, Any]) -> None:
    """``result`` as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result, indent=1) + "\n")
