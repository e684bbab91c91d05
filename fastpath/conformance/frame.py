"""What a conformance case is, how bits are compared, and the report."""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from fastpath.backend import EMULATED, INTERPRETED, ON_CPU, Launch, current_target, record


@dataclass(frozen=True)
class Comparison:
    """Two arrays compared by bit pattern, NaN as a class."""

    what: str
    compared: int
    different: int
    #: Index, bits got and bits expected of the first difference; empty if there is none.
    first: str = ""


@dataclass(frozen=True)
class Case:
    """One kernel under one kind of use. ``run`` gives comparisons as it goes."""

    #: Operator, or what exercises it: the name that ``--only`` selects by prefix.
    name: str
    run: Callable[[], Iterable[Comparison]]
    #: Arithmetic profile that it needs of the target.
    unit: str = "fma32-seq"


def device() -> torch.device:
    """Where this process computes."""
    return torch.device("cpu" if ON_CPU else "cuda")


def to_device(values: NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor of ``values``; float32 values must be exact in ``dtype``."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(device())
    return tensor if dtype is None else tensor.to(dtype)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's values; bfloat16 widens to float32 on bits."""
    if tensor.dtype == torch.bfloat16:
        narrow = tensor.detach().contiguous().view(torch.int16).cpu().numpy().astype(np.uint16)
        widened: NDArray[Any] = (narrow.astype(np.uint32) << 16).view(np.float32)
        return widened
    array: NDArray[Any] = tensor.detach().contiguous().cpu().numpy()
    return array


def compare(what: str, got: torch.Tensor | NDArray[Any], expected: torch.Tensor | NDArray[Any]) -> Comparison:
    """Bits of ``got`` against bits of ``expected``. A different shape or dtype is a difference in every element."""
    left = to_numpy(got) if isinstance(got, torch.Tensor) else got
    right = to_numpy(expected) if isinstance(expected, torch.Tensor) else expected
    if left.shape != right.shape or left.dtype != right.dtype:
        return Comparison(
            what, right.size, right.size, f"{left.dtype}{left.shape}, expected {right.dtype}{right.shape}"
        )
    if left.dtype == np.float32:
        a, b = np.ascontiguousarray(left).view(np.uint32), np.ascontiguousarray(right).view(np.uint32)
        bad = (a != b) & ~(np.isnan(left) & np.isnan(right))
    else:
        a, b = left, right
        bad = a != b
    where = np.argwhere(bad)
    if not len(where):
        return Comparison(what, right.size, 0)
    index = tuple(int(i) for i in where[0])
    first = f"{list(index)}: got {int(a[index]):#010x}, expected {int(b[index]):#010x}"
    return Comparison(what, right.size, len(where), first)


def families() -> Iterator[tuple[str, list[Case]]]:
    """Modules of this package that have cases."""
    package = importlib.import_module("fastpath.conformance")
    for found in pkgutil.iter_modules(package.__path__):
        if found.name != "__main__":
            module = importlib.import_module(f"fastpath.conformance.{found.name}")
            if hasattr(module, "cases"):
                yield found.name, list(module.cases())


def run(
    only: str = "",
    jobs: int = 1,
    say: Callable[[str], None] = print,
    deadline: float | None = None,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run all cases whose name starts with ``only`` (or one of several, by commas), in ``jobs`` processes.

    Returns the report as plain data. No case starts after ``deadline`` (of `time.perf_counter`); one that therefore
    was not run is listed as such. ``save`` gets the report after every case, the cases still to come among those not
    run: what was measured then outlives a machine that is taken away.

    A case that raises counts as failed, with its error; one whose unit this target lacks is listed as not run.
    """
    not_run: list[dict[str, str]] = []
    chosen: list[tuple[str, str]] = []
    for family, cases in families():
        for case in cases:
            if case.unit not in current_target().units:
                not_run.append({"name": case.name, "reason": f"{current_target().arch} has no {case.unit}"})
            elif case.name.startswith(tuple(only.split(","))):
                chosen.append((family, case.name))
    if deadline is not None:
        # plain values of every family first: what the time does not reach then is more of the same kernels
        chosen.sort(key=lambda names: "/normal" not in names[1] and "/model" not in names[1])
    results: list[dict[str, Any]] = []
    waiting = dict.fromkeys(name for _, name in chosen)
    for names, result in _run_all(chosen, jobs, deadline):
        del waiting[names[1]]
        if result is None:
            not_run.append({"name": names[1], "reason": "the time was up"})
            continue
        results.append(result)
        verdict = "ok " if result["passed"] else "BAD"
        counts = f"{result['different']:>9} of {result['compared']:>11} differ"
        say(f"{verdict} {result['name']:<48} {counts} {result['seconds']:6.1f} s")
        if not result["passed"]:
            say(f"    {result['error'] or result['first']}")
        if save is not None and waiting:
            save(_report(results, not_run + [{"name": name, "reason": "interrupted before it"} for name in waiting]))
    return _report(results, not_run)


def _run_all(
    chosen: list[tuple[str, str]], jobs: int, deadline: float | None
) -> Iterator[tuple[tuple[str, str], dict[str, Any] | None]]:
    if jobs == 1:
        for names in chosen:
            yield names, None if deadline is not None and time.perf_counter() > deadline else _run_case(*names)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(_run_case, *names): names for names in chosen}
        for done in as_completed(waiting):
            yield waiting[done], None if done.cancelled() else done.result()
            if deadline is not None and time.perf_counter() > deadline:
                for other in waiting:
                    other.cancel()


def _run_case(family: str, name: str) -> dict[str, Any]:
    module = importlib.import_module(f"fastpath.conformance.{family}")
    case = next(case for case in module.cases() if case.name == name)
    start, error = time.perf_counter(), ""
    comparisons: list[Comparison] = []
    with record() as launches:
        try:
            comparisons.extend(case.run())
        except Exception as raised:  # whatever it is, the other cases still say what works
            error = f"{type(raised).__name__}: {str(raised)[:2000]}"
    failed = [c for c in comparisons if c.different]
    return {
        "family": family,
        "name": case.name,
        "unit": case.unit,
        "passed": not error and not failed and bool(comparisons),
        "comparisons": len(comparisons),
        "compared": sum(c.compared for c in comparisons),
        "different": sum(c.different for c in comparisons),
        "first": f"{failed[0].what} {failed[0].first}" if failed else "",
        "failed": [asdict(c) for c in failed[:20]],
        "error": error,
        "seconds": round(time.perf_counter() - start, 2),
        "launches": _distinct(launches),
    }


def _distinct(launches: Iterable[Launch]) -> list[dict[str, Any]]:
    distinct: dict[str, dict[str, Any]] = {}
    for launch in launches:
        entry = distinct.setdefault(launch.code_sha256 + launch.contract_id, launch.as_dict() | {"launches": 0})
        entry["launches"] += 1
    return list(distinct.values())


def _report(results: list[dict[str, Any]], not_run: list[dict[str, str]]) -> dict[str, Any]:
    target = current_target()
    kernels, cases = _kernels(results)
    return {
        "command": " ".join(["python", "-m", "fastpath.conformance", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": target.arch,
        "device": _device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "summary": {
            "cases": len(results),
            "passed": sum(r["passed"] for r in results),
            "compared": sum(r["compared"] for r in results),
            "different": sum(r["different"] for r in results),
            "not_run": len(not_run),
        },
        "cases": cases,
        "kernels": kernels,
        "not_run": not_run,
    }


def _device_name() -> str:
    if EMULATED:
        return f"{EMULATED} code executed in emulation"
    return "Triton's interpreter" if INTERPRETED else torch.cuda.get_device_name()


def _kernels(results: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Every kernel and contract once, by a short name; and the cases, their launches as counts by that name."""
    kernels: dict[str, dict[str, Any]] = {}
    cases = []
    for result in results:
        counts = {}
        for launch in result["launches"]:
            name = f"{launch['kernel']}-{launch['code_sha256'][:10]}-{launch['contract_id'][:10]}"
            counts[name] = launch["launches"]
            kernels[name] = {key: value for key, value in launch.items() if key != "launches"}
        cases.append({**result, "launches": counts})
    return dict(sorted(kernels.items())), cases
