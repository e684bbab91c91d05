"""The kernels behind the operator interface, in a process in which Triton interprets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fastpath.interpreter import run


def test_kernels_behind_the_interface() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("kernel_operators.py")))
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.exhaustive
def test_a_real_megatron_has_one_backward(tmp_path: Path) -> None:
    """Forward and backward through the interpreted kernels, against the arrays: every gradient in bits."""
    import torch

    files = {which: tmp_path / f"{which}.pt" for which in ("arrays", "kernels")}
    for which, file in files.items():
        done = run("-m", "tests.integration.megatron_gradients", which, str(file))
        assert done.returncode == 0, done.stderr[-4000:]
    left, right = (torch.load(file, weights_only=True) for file in files.values())
    assert left.keys() == right.keys() and len(left) > 20
    for name, gradient in left.items():
        assert torch.equal(gradient.view(torch.int32), right[name].view(torch.int32)), name
