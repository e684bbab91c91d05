"""One run of the whole kit, and the JSON that it gives."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
import triton

from fastpath.backend import INTERPRETED, UnsupportedError, current_target
from fastpath.conformance import frame
from fastpath.measure import advice
from fastpath.measure.ceilings import measure_ceilings
from fastpath.measure.primitives import FUNCTIONS, measure_primitive
from fastpath.measure.units import ROUTES, measure_unit, reachable

SCHEMA = 1
#: Conformance cases of the interpreter's small form.
SMALL = "qk_norm_rope/float32/normal,linear/fma32-seq/float32/bias,logprob/gradient"

#: say(line): one line for the reader.
Say = Callable[[str], None]


def measure(minutes: float, say: Say) -> dict[str, Any]:
    """Measure this machine's GPU; in the interpreter, primitives and a few kernels, and say what was left out.

    Args:
        minutes: no conformance case starts later than this; those that were not run are named.

    Raises:
        UnsupportedError: no GPU, and not in Triton's interpreter.
    """
    started = time.perf_counter()
    if not INTERPRETED and not torch.cuda.is_available():
        raise UnsupportedError("no GPU found")
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "rlk-measure",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": _device(),
        "versions": _versions(),
        "seconds": {},
        "not_run": [],
    }
    steps: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("units", lambda: _units(report, say)),
        ("primitives", lambda: _primitives(report, say)),
        ("ceilings", lambda: _ceilings(report, say)),
        ("conformance", lambda: _conformance(report, started + 60 * minutes, say)),
    )
    for name, step in steps:
        since = time.perf_counter()
        report[name] = step()
        report["seconds"][name] = round(time.perf_counter() - since, 1)
    report["findings"] = advice.findings(report)
    report["seconds"]["all"] = round(time.perf_counter() - started, 1)
    return report


def _device() -> dict[str, Any]:
    if INTERPRETED:
        return {
            "name": "Triton's interpreter",
            "arch": "cpu",
            "runtime": "interpreter",
            "processor": platform.machine(),
        }
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    is_rocm = bool(torch.version.hip)
    arch = str(properties.gcnArchName).split(":")[0] if is_rocm else f"sm_{properties.major}{properties.minor}"
    return {
        "name": properties.name,
        "arch": arch,
        "runtime": "hip" if is_rocm else "cuda",
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def _versions() -> dict[str, str | None]:
    try:
        own: str | None = version("rlk")
    except PackageNotFoundError:
        own = None
    return {
        "rlk": own,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
    }


def _leave_out(report: dict[str, Any], what: str, why: str, say: Say) -> None:
    report["not_run"].append({"what": what, "why": why})
    say(f"not run: {what}: {why}")


def _units(report: dict[str, Any], say: Say) -> list[dict[str, Any]]:
    device: dict[str, Any] = report["device"]
    results: list[dict[str, Any]] = []
    if INTERPRETED:
        _leave_out(report, "units", "the interpreter has no matrix unit", say)
        return results
    for name in reachable(device["arch"]):
        for route in ROUTES[device["runtime"]]:
            try:
                result = measure_unit(device["arch"], name, route)
            except Exception as error:  # one format that a release cannot compile leaves the others to be measured
                _leave_out(report, f"unit {name}, {route.name}", f"{type(error).__name__}: {str(error)[:300]}", say)
                continue
            results.append(result)
            by = "; ".join(result["reproduced_by"] or result["searched"]) or "no known model"
            used = ", ".join(result["instructions"])
            say(f"unit {name:<16} {route.name:<8} {result['accumulations']:>10} accumulations: {by} ({used})")
    return results


def _primitives(report: dict[str, Any], say: Say) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for name in FUNCTIONS:
        try:
            result = measure_primitive(name)
        except UnsupportedError as error:
            _leave_out(report, "primitives", str(error), say)
            return results
        results.append(result)
        bad = result["different"] or (f"{len(result['wrong_blocks'])} blocks" if result.get("wrong_blocks") else 0)
        say(f"primitive {name:<18} {result['inputs']:>10} inputs, {bad} differ")
    return results


def _ceilings(report: dict[str, Any], say: Say) -> dict[str, Any]:
    if INTERPRETED:
        _leave_out(report, "ceilings", "the interpreter's speed says nothing", say)
        return {}
    found = measure_ceilings()
    for name, value in found.items():
        say(f"ceiling {name}: " + ", ".join(f"{number} {unit}" for unit, number in value.items()))
    return found


def _conformance(report: dict[str, Any], deadline: float, say: Say) -> dict[str, Any]:
    try:
        current_target()
    except UnsupportedError as error:
        _leave_out(report, "conformance", str(error), say)
        return {}
    jobs = 1 if INTERPRETED else max(1, min(16, (os.cpu_count() or 2) - 1))
    found = frame.run(SMALL if INTERPRETED else "", jobs, say, deadline)
    for skipped in found["not_run"]:
        report["not_run"].append({"what": f"conformance {skipped['name']}", "why": skipped["reason"]})
    keep = ("name", "unit", "passed", "compared", "different", "first", "error", "seconds")
    kernels = {name: entry["code_sha256"] for name, entry in found["kernels"].items()}
    cases = [{key: case[key] for key in keep} for case in sorted(found["cases"], key=lambda case: case["name"])]
    return {"summary": found["summary"], "cases": cases, "kernels": kernels}
