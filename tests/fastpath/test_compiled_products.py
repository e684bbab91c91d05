"""Compiled code of matrix products and vocabulary kernels, for gfx942 and sm_90 without a GPU: every rule holds."""

from __future__ import annotations

import re

import pytest

from fastpath.backend import plan
from fastpath.compiled.catalogue import contract, empty
from fastpath.compiled.check import examine
from fastpath.compiled.code import compile_plan
from fastpath.row_linear import row_linear
from fastpath.schedules import Schedule

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


@pytest.mark.parametrize("local", [2, 8])
def test_threads_meet_before_they_read_what_others_stored(local: int) -> None:
    """In tree_kernel, sums pass from thread to thread through global memory: a barrier comes before the first load."""
    schedule = Schedule(128, 128, 64, local=local, warps=8, stages=4, persistent=True)
    with plan("sm_90") as launches:
        x, w = empty(4096, 4096), empty(4096, 4096)
        row_linear(x, w, contract("row_linear", "bfloat16", "hopper-k16"), plan=schedule)
    code = compile_plan(next(launch for launch in launches if launch.kernel.fn.__name__ == "tree_kernel"))
    after = code.assembly[code.assembly.rindex("wgmma.wait_group") :]
    assert re.findall(r"bar\.sync|ld\.global|st\.global", after)[0] == "bar.sync"
    # the copies of the next steps are in flight while one multiplies
    assert "wgmma.wait_group.sync.aligned \t1" in code.assembly or "wgmma.wait_group.sync.aligned 1" in code.assembly
