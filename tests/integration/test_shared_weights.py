"""Weights in memory that two processes map, and their fingerprints: on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.fingerprint import PREFIX, fingerprints
from integration.shared_weights import SharedWeights

#: What the other process does: open, digest, and say so.
READER = """
import json, sys
from integration.fingerprint import fingerprints
from integration.shared_weights import open_shared
print(json.dumps(fingerprints(open_shared(json.loads(sys.stdin.read())))))
"""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def some(seed: int) -> dict[str, Any]:
    """Weights of odd sizes, subnormals, NaN and both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(1031, 1100, generator=generator).bfloat16()
    table[0, :4] = torch.tensor([float("nan"), -0.0, 0.0, 1e-40])
    return {"table": table, "norm": torch.randn(7, generator=generator).bfloat16(), "wide": torch.arange(5.0)}


@pytest.mark.parametrize("device", DEVICES)
def test_another_process_sees_the_bits_and_their_replacement(device: str, tmp_path: Path) -> None:
    first, second = some(1), some(2)
    shared = SharedWeights(first, device, tmp_path / "shared.bin")
    for weights in (first, second):
        shared.fill({name: tensor.to(device) for name, tensor in weights.items()})
        place = json.dumps(shared.describe())
        done = subprocess.run([sys.executable, "-c", READER], input=place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        # Of the host's own copy: the fingerprint does not depend on the device.
        assert json.loads(done.stdout) == fingerprints(weights) == fingerprints(shared.tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fingerprint_sees_one_bit_two_swapped_values_and_another_shape(device: str) -> None:
    table = some(3)["table"].to(device)
    known = fingerprints({"x": table})["x"]
    assert known.startswith(f"{PREFIX}bfloat16[1031, 1100]:") and known == fingerprints({"x": table.clone()})["x"]
    bits = table.view(torch.int16)
    for change in ("bit", "sign of zero", "swap", "last"):
        other = table.clone()
        patterns = other.view(torch.int16)
        if change == "bit":
            patterns[512, 77] ^= 1
        elif change == "sign of zero":
            patterns[0, 2] = -(2**15)
        elif change == "swap":
            patterns[3, 5], patterns[900, 8] = bits[900, 8].clone(), bits[3, 5].clone()
        else:
            patterns[-1, -1] ^= 2
        assert fingerprints({"x": other})["x"] != known, change
    assert fingerprints({"x": table.reshape(1100, 1031)})["x"] != known
    # A part that does not begin at a whole word, and a transposed one.
    assert fingerprints({"x": table[1:, 3:]}) == fingerprints({"x": table[1:, 3:].contiguous().cpu()})
    assert fingerprints({"x": table.T}) == fingerprints({"x": table.T.contiguous()})
