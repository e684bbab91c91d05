"""The kernels behind the operator interface, in a process in which Triton interprets them."""

from __future__ import annotations

from pathlib import Path

from tests.fastpath.test_interpreter import run


def test_kernels_behind_the_interface() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("kernel_operators.py")))
    assert done.returncode == 0, done.stdout[-4000:]
