"""Kernels in Triton's interpreter: every case of the default suite runs once, in one process, whoever asks first."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fastpath.interpreter import conformance_report, two_ranks_report

#: Name -> what was found of it.
Found = dict[str, dict[str, Any]]


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Any:
    """The JSON that ``make`` writes, made once for all workers of the session."""
    base = factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    report = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not report.exists():
            make(report)
    return json.loads(report.read_text())


@pytest.fixture(scope="session")
def conformance(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By case: what ``python -m fastpath.conformance`` found."""
    return {case["name"]: case for case in once(tmp_path_factory, "conformance", conformance_report)["cases"]}


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By comparison: what ``python -m fastpath.conformance.parallel --ranks 2`` found."""
    return {c["what"]: c for c in once(tmp_path_factory, "two-ranks", two_ranks_report)["comparisons"]}
