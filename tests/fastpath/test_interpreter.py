"""Kernels against the reference on the CPU. Triton decides at import whether it interprets, so: in other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
#: Cases that take seconds in the interpreter; `python -m fastpath.conformance` runs all.
CASES = (
    "linear/fma32-seq/float32,linear/fma32-seq/bfloat16/gradients,row_linear/fma32-seq/float32/values,"
    "logsumexp/values,logprob/gradient,processed_logits,lm_head_logprob/fma32-seq/float32/gradient,"
    "qk_norm_rope/float32/cancelling,qk_norm_rope/bfloat16/wide"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False
    )


def test_kernels_in_the_interpreter() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("interpreted.py")))
    assert done.returncode == 0, done.stdout[-4000:]


def test_conformance_cases(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run("-m", "fastpath.conformance", "--only", CASES, "--json", str(report))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = json.loads(report.read_text())["summary"]
    assert summary["passed"] == summary["cases"] == 11
    assert summary["different"] == 0
    assert summary["compared"] > 30000


def test_two_ranks(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run("-m", "fastpath.conformance.parallel", "--ranks", "2", "--json", str(report))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(report.read_text())
    assert found["summary"]["different"] == 0
    assert {c["what"] for c in found["comparisons"]} >= {"3x16x64 TP 2", "reduce_scatter", "logsumexp"}
