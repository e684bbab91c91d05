"""Row kernels and attention against the reference on the CPU, in processes in which Triton interprets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fastpath.conftest import Found
from tests.fastpath.interpreter import run


def test_kernels_as_torch_sees_them() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("interpreted_kernels.py")))
    assert done.returncode == 0, done.stdout[-4000:]


def conformance(only: str, report: Path) -> dict[str, int]:
    done = run("-m", "fastpath.conformance", "--only", only, "--json", str(report))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary: dict[str, int] = json.loads(report.read_text())["summary"]
    return summary


def test_kernels_have_the_bits_of_the_reference(conformance: Found) -> None:
    families = {case["family"] for case in conformance.values()}
    assert families >= {"rows", "attention", "products", "vocabulary"}
    assert all(case["passed"] for case in conformance.values())


@pytest.mark.exhaustive
def test_every_case(tmp_path: Path) -> None:
    for family in ("rms_norm", "qk_norm", "rope", "swiglu", "residual_add", "embedding", "kv_cache", "attention"):
        assert conformance(family, tmp_path / "report.json")["different"] == 0
