"""Processes in which Triton interprets kernels (it decides so at import), and the cases that run there by default."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
#: Cases that take seconds in the interpreter, by operator (beginnings of names); `python -m fastpath.conformance` runs
#: all of them.
CASES = {
    "rms_norm": ("rms_norm/bfloat16/signed_zero",),
    "qk_norm": ("qk_norm/bfloat16/nan",),
    "qk_norm_rope": ("qk_norm_rope/float32/cancelling", "qk_norm_rope/bfloat16/wide"),
    "rope": ("rope/bfloat16/infinity",),
    "swiglu": ("swiglu/every-gate",),
    "residual_add": ("residual_add/bfloat16/cancelling",),
    "embedding": ("embedding/bfloat16/normal",),
    "kv_cache": ("kv_cache/bfloat16/nan",),
    "attention": ("attention/fma32-seq/bfloat16/normal/(20,)", "attention/fma32-seq/float32/nan"),
    "attention_backward": ("attention/fma32-seq/bfloat16/gradients",),
    "linear": ("linear/fma32-seq/float32", "linear/fma32-seq/bfloat16/gradients"),
    "row_linear": ("row_linear/fma32-seq/float32/values",),
    "lm_head": ("lm_head_logprob/fma32-seq/float32/gradient",),
    "logsumexp": ("logsumexp/values",),
    "logprob": ("logprob/gradient",),
    "entropy": ("entropy/values",),
    "processed_logits": ("processed_logits",),
    "moe_router": ("moe_router/values",),
    "moe_combine": ("moe_combine/values",),
    "moe_experts": ("moe_experts/fma32-seq/float32",),
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python`` with ``arguments``, in the interpreter."""
    return subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False
    )


def in_interpreter(source: str) -> subprocess.CompletedProcess[str]:
    """Run Python source in one."""
    return run("-c", dedent(source))


def conformance_report(path: Path) -> None:
    """Run all of `CASES` and write the report to ``path``."""
    done = run(
        "-m", "fastpath.conformance", "--only", ",".join(c for few in CASES.values() for c in few), "--json", str(path)
    )
    # 1: a case failed; the test of its operator says which.
    assert done.returncode in (0, 1) and path.exists(), done.stdout[-4000:] + done.stderr[-4000:]


def two_ranks_report(path: Path) -> None:
    """Run the collectives on two ranks and write the report to ``path``."""
    done = run("-m", "fastpath.conformance.parallel", "--ranks", "2", "--json", str(path))
    assert done.returncode in (0, 1) and path.exists(), done.stdout[-4000:] + done.stderr[-4000:]


def assert_conforms(found: Mapping[str, dict[str, Any]], operator: str) -> None:
    """Every case of ``operator`` ran, compared something, and found no different bit."""
    for start in CASES[operator]:
        mine = [case for name, case in found.items() if name.startswith(start)]
        assert mine, f"no case begins with {start}"
        for case in mine:
            assert case["passed"] and case["compared"] and not case["different"], case["error"] or case["first"]
