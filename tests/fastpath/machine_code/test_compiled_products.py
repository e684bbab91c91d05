"""Compiled code of matrix products and vocabulary kernels, for gfx942 and sm_90 without a GPU: every rule holds."""

from __future__ import annotations

import re

import pytest

from fastpath.backend import plan
from fastpath.machine_code.catalogue import contract, empty
from fastpath.machine_code.check import examine
from fastpath.machine_code.code import compile_plan
from fastpath.products.row_linear import row_linear
from fastpath.products.schedules import Schedule

#: One of every kernel and matrix instruction; the exhaustive test takes all calls.
SOME = (
    ("gfx942", "linear/mfma-cdna3-g8/bfloat16/8x6144x4096"),
    ("gfx942", "row_linear/mfma-cdna3-g8/bfloat16/4096/bias"),
    ("gfx942", "linear/fma32-seq/float32/ragged"),
    ("gfx942", "lm_head_logprob/mfma-cdna3-g8/bfloat16/256"),
    ("gfx942", "linear/mfma-cdna3-g8/bfloat16/4096/weight-gradient"),
    ("gfx942", "processed_logits/ascending"),
    ("sm_90", "linear/hopper-k16/bfloat16/8x6144x4096"),
    ("sm_90", "linear/hopper-k16/bfloat16/64x6144x4096"),
    ("sm_90", "row_linear/hopper-k16/bfloat16/4096x4096x4096"),
    ("sm_90", "row_linear/fma32-seq/float32/4096/bias"),
    ("sm_90", "lm_head_logprob/hopper-k16/bfloat16/256"),
    ("sm_90", "linear/hopper-k16/bfloat16/4096/input-gradient"),
)


@pytest.mark.parametrize(("arch", "only"), SOME)
def test_every_rule_holds(arch: str, only: str) -> None:
    reports = list(examine(arch, only))
    assert reports
    assert [(report.kernel, report.findings) for report in reports if report.findings] == []


@pytest.mark.parametrize(("outputs", "local"), [(128, 2), (128, 4), (64, 8)])
def test_waiting_sums_stay_in_registers(outputs: int, local: int) -> None:
    """tree_kernel keeps no sum in memory, and copies run ahead of the products."""
    schedule = Schedule(64, outputs, 64, local=local, stages=4, persistent=True, residents=2)
    with plan("sm_90") as launches:
        x, w = empty(4096, 4096), empty(4096, 4096)
        row_linear(x, w, contract("row_linear", "bfloat16", "hopper-k16"), plan=schedule)
    code = compile_plan(next(launch for launch in launches if launch.kernel.fn.__name__ == "tree_kernel"))
    assert "ld.global" not in code.assembly
    # one product is under way while the next is issued
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", code.assembly)
