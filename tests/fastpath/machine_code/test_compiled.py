"""Checks of compiled code: every kernel passes, and a deliberately wrong kernel fails each rule. No GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from fastpath.backend import TARGETS, Plan
from fastpath.machine_code.catalogue import calls, contract
from fastpath.machine_code.check import Report, check, examine, planned
from fastpath.machine_code.code import Code, compile_plan
from fastpath.machine_code.rules import EXPECTATIONS, RULES
from reference.contract.base import CONTRACTS, GRADIENTS
from tests.fastpath.machine_code import wrong_kernels as wrong
from tests.schemas import conforms

ROOT = Path(__file__).parents[3]
#: Unit of the matrix instruction of each target.
UNITS = {"gfx942": "mfma-cdna3-g8", "sm_90": "hopper-k16"}
#: Calls compiled by default; the exhaustive test takes all.
SOME = ("qk_norm/bfloat16/backward", "rope/bfloat16/interleaved", "swiglu/bfloat16", "embedding/bfloat16/backward")


def compiled(
    kernel: Any, arch: str, of: Any, *dtypes: torch.dtype, changed: dict[str, Any] | None = None, **constants: Any
) -> Code:
    """A kernel on tensors of ``dtypes``, with the target's options but for what is ``changed``."""
    target = TARGETS[arch]
    arguments = tuple(torch.empty(64, dtype=dtype, device="meta") for dtype in dtypes)
    options = {"num_warps": 4, **target.options, **(changed or {})}
    return compile_plan(Plan(kernel, arguments, constants, options, of, target))


def broken(code: Code) -> set[str]:
    """Names of the rules that the code breaks."""
    return {finding.rule for finding in check(code)}


F32, BF16 = torch.float32, torch.bfloat16
TARGETS_WITH_CODE = ("gfx942", "sm_90")


@pytest.mark.parametrize("arch", TARGETS_WITH_CODE)
@pytest.mark.parametrize("only", SOME)
def test_kernels_pass(arch: str, only: str) -> None:
    reports = list(examine(arch, only))
    assert reports
    for report in reports:
        assert not report.findings, f"{report.call} {report.kernel}: {report.findings}"
        assert report.resources.registers > 0 and report.resources.occupancy > 0


@pytest.mark.parametrize("arch", TARGETS_WITH_CODE)
def test_attention_passes(arch: str) -> None:
    name = f"attention/{UNITS[arch]}/bfloat16/64/decode"
    reports = [r for r in examine(arch, name) if r.call == name]
    assert {r.kernel for r in reports} == {"scores_kernel", "probabilities_kernel", "values_kernel"}
    assert not [r.findings for r in reports if r.findings]


def known(report: Report) -> bool:
    """Plain FMA attention of 128 features or more spills on sm_90: slow, not wrong."""
    portable = report.target == "sm_90" and report.call.startswith("attention/fma32-seq")
    return portable and {finding.rule for finding in report.findings} == {"no-spills"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", TARGETS_WITH_CODE)
def test_every_kernel_and_schedule_passes(arch: str) -> None:
    bad = [(r.call, r.kernel, r.findings) for r in examine(arch) if r.findings and not known(r)]
    assert not bad


@pytest.mark.parametrize("arch", TARGETS_WITH_CODE)
def test_plain_kernel_is_clean(arch: str) -> None:
    assert not broken(compiled(wrong.multiply_then_add, arch, contract("residual_add", "float32"), F32, F32, BLOCK=256))


@pytest.mark.parametrize("arch", TARGETS_WITH_CODE)
def test_fused_multiply_add_is_found(arch: str) -> None:
    fused = {"enable_fp_fusion": True}
    of = contract("residual_add", "float32")
    assert broken(compiled(wrong.multiply_then_add, arch, of, F32, F32, changed=fused, BLOCK=256)) == {"no-contraction"}


@pytest.mark.parametrize("arch", TARGETS_WITH_CODE)
@pytest.mark.parametrize("name", ["exp", "exp2", "log", "rsqrt", "sqrt", "sigmoid"])
def test_hardware_functions_are_found(arch: str, name: str) -> None:
    code = compiled(wrong.hardware_function, arch, contract("rms_norm", "float32"), F32, F32, BLOCK=256, NAME=name)
    assert broken(code) & {"no-approximation", "mode-bits"}  # NVIDIA's log is a polynomial that flushes subnormals


@pytest.mark.parametrize("arch", TARGETS_WITH_CODE)
def test_division_is_found_where_the_contract_has_none(arch: str) -> None:
    code = compiled(wrong.hardware_function, arch, contract("rope", "float32"), F32, F32, BLOCK=256, NAME="divide")
    assert broken(code) == {"no-approximation"}
    code = compiled(wrong.hardware_function, arch, contract("swiglu", "float32"), F32, F32, BLOCK=256, NAME="div_rn")
    assert not broken(code)
    code = compiled(wrong.hardware_function, arch, contract("swiglu", "float32"), F32, F32, BLOCK=256, NAME="divide")
    # LLVM's own float32 division on AMD is IEEE's only if v_rcp_f32 is better than documented
    assert broken(code) == ({"no-approximation"} if arch == "gfx942" else set())


@pytest.mark.parametrize("arch", TARGETS_WITH_CODE)
def test_wrong_matrix_instruction_is_found(arch: str) -> None:
    matrix, portable = contract("linear", "bfloat16", UNITS[arch]), contract("linear", "bfloat16")
    dtypes = (BF16, BF16, F32)
    assert not broken(compiled(wrong.product, arch, matrix, *dtypes, SIZE=64, WIDEN=False))
    assert not broken(compiled(wrong.product, arch, portable, *dtypes, SIZE=32, WIDEN=True))
    assert "matrix-instruction" in broken(compiled(wrong.product, arch, portable, *dtypes, SIZE=64, WIDEN=False))
    assert "matrix-instruction" in broken(compiled(wrong.product, arch, matrix, *dtypes, SIZE=32, WIDEN=True))
    without = contract("rms_norm", "bfloat16")
    assert "matrix-instruction" in broken(compiled(wrong.product, arch, without, *dtypes, SIZE=64, WIDEN=False))


def test_permuted_k_is_found() -> None:
    of = contract("linear", "bfloat16", "mfma-cdna3-g8")
    code = compiled(wrong.product, "gfx942", of, BF16, BF16, F32, changed={"kpack": 2}, SIZE=64, WIDEN=False)
    assert broken(code) == {"ascending-k", "kpack"}


def test_flushed_subnormals_are_found() -> None:
    of = contract("residual_add", "float32")
    flush = {"allow_flush_denorm": True}
    code = compiled(wrong.multiply_then_add, "gfx942", of, F32, F32, changed=flush, BLOCK=256)
    assert broken(code) == {"mode-bits"}


@pytest.mark.parametrize(("arch", "count"), [("gfx942", 80), ("sm_90", 64)])
def test_spills_are_found(arch: str, count: int) -> None:
    few = {"num_warps": 1, **({"waves_per_eu": 4} if arch == "gfx942" else {"maxnreg": 64})}
    of = contract("residual_add", "float32")
    code = compiled(wrong.too_many_values, arch, of, F32, F32, changed=few, BLOCK=128, COUNT=count)
    assert broken(code) == {"no-spills"}


def test_every_rule_has_a_wrong_kernel() -> None:
    shown = {
        "no-contraction",
        "no-approximation",
        "matrix-instruction",
        "ascending-k",
        "kpack",
        "no-float-atomics",
        "mode-bits",
        "no-spills",
    }
    assert {rule.name for rules in RULES.values() for rule in rules} == shown


def test_catalogue_reaches_every_operator_of_this_package() -> None:
    assert set(EXPECTATIONS) <= set(CONTRACTS)
    reached = {launch.contract.operator for _, launch in planned("sm_90", calls())}
    assert {"embedding", "rms_norm", "qk_norm", "rope", "swiglu", "residual_add", "kv_cache", "attention"} <= reached
    # entropy's gradient has no kernel, and that of lm_head is linear's
    assert set(GRADIENTS) - {"entropy_backward", "lm_head_backward"} <= reached


def test_unknown_target_and_call_are_refused() -> None:
    from fastpath.backend import UnsupportedError

    with pytest.raises(ValueError, match="only"):
        list(examine("gfx942", "no such call"))
    with pytest.raises(UnsupportedError, match="arch"):
        list(examine("gfx90a", "rope"))


#: Together they launch every kernel; the exhaustive test takes all calls.
REACHING_ALL = (
    *("rms_norm/bfloat16/residual", "qk_norm/bfloat16", "swiglu/bfloat16", "rope/bfloat16/halves", "rope/bfloat16"),
    *("residual_add/bfloat16", "embedding/bfloat16", "kv_cache/bfloat16", "attention/mfma-cdna3-g8/bfloat16/64/"),
    *("row_linear/mfma-cdna3-g8/bfloat16/64/bias", "lm_head_logprob/mfma-cdna3-g8/bfloat16/64", "logsumexp"),
    *("logprob/bfloat16", "all_logprobs", "processed_logits", "row_linear_norm/mfma-cdna3-g8"),
    *("entropy", "moe_router/before_top_k", "moe_combine/bfloat16", "linear/mfma-cdna3-g8/bfloat16/64/experts"),
)


def other_release(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The checks for gfx942 under the release in the folder RLK_OTHER_TRITON: `pip install --target`, by make test."""
    other = os.environ.get("RLK_OTHER_TRITON")
    if not other:
        pytest.skip("RLK_OTHER_TRITON names no folder with another Triton release; make test sets it")
    command = [sys.executable, "-m", "fastpath.compiled", "--target", "gfx942", *arguments]
    environment = {**os.environ, "PYTHONPATH": other}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_other_triton_release(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = other_release("--only", ",".join(REACHING_ALL), "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    conforms("machine-code", found)
    assert found["triton"] != triton.__version__
    every = {launch.kernel.fn.__name__ for _, launch in planned("gfx942", calls())}
    assert {entry["kernel"] for entry in found["reports"]} == every


@pytest.mark.exhaustive
def test_every_kernel_and_schedule_passes_in_the_other_release() -> None:
    done = other_release()
    assert done.returncode == 0, done.stdout + done.stderr
