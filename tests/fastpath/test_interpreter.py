"""Kernels against the reference on the CPU. Triton decides at import whether it interprets, so: in other processes."""

from __future__ import annotations

from pathlib import Path

from tests.fastpath.conftest import Found
from tests.fastpath.interpreter import CASES, run


def test_kernels_in_the_interpreter() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("interpreted.py")))
    assert done.returncode == 0, done.stdout[-4000:]


def test_conformance_cases(conformance: Found) -> None:
    """All of them ran; the tests of the operators say what was found."""
    begun = {start for few in CASES.values() for start in few}
    assert all(any(name.startswith(start) for name in conformance) for start in begun)
    assert sum(case["different"] for case in conformance.values()) == 0
    assert sum(case["compared"] for case in conformance.values()) > 130_000


def test_two_ranks(two_ranks: Found) -> None:
    assert not [found["what"] for found in two_ranks.values() if found["different"]]
    assert set(two_ranks) >= {"3x16x64 TP 2", "reduce_scatter", "logsumexp"}
