"""Row kernels and attention against the reference on the CPU, in processes in which Triton interprets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fastpath.test_interpreter import run

#: Cases that take seconds in the interpreter; `python -m fastpath.conformance` runs all.
CASES = (
    "rms_norm/bfloat16/signed_zero",
    "qk_norm/bfloat16/nan",
    "rope/bfloat16/infinity",
    "swiglu/every-gate",
    "residual_add/bfloat16/cancelling",
    "embedding/bfloat16/normal",
    "kv_cache/bfloat16/nan",
    "attention/fma32-seq/bfloat16/normal/(20,)",
    "attention/fma32-seq/float32/nan",
    "attention/fma32-seq/bfloat16/gradients",
)


def test_kernels_as_torch_sees_them() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("interpreted_kernels.py")))
    assert done.returncode == 0, done.stdout[-4000:]


def conformance(only: str, report: Path) -> dict[str, int]:
    done = run("-m", "fastpath.conformance", "--only", only, "--json", str(report))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary: dict[str, int] = json.loads(report.read_text())["summary"]
    return summary


def test_kernels_have_the_bits_of_the_reference(tmp_path: Path) -> None:
    summary = conformance(",".join(CASES), tmp_path / "report.json")
    assert summary["passed"] == summary["cases"] == len(CASES)
    assert summary["different"] == 0 and summary["compared"] > 100_000


@pytest.mark.exhaustive
def test_every_case(tmp_path: Path) -> None:
    for family in ("rms_norm", "qk_norm", "rope", "swiglu", "residual_add", "embedding", "kv_cache", "attention"):
        assert conformance(family, tmp_path / "report.json")["different"] == 0
