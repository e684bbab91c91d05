"""Matrix units against mmasim, an independent simulator; skipped where it is not installed."""

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest

from reference.dot import UNITS, dot
from reference.formats import FORMATS
from tests.reference.bits import assert_same_bits
from tests.reference.dot.dot_cases import KINDS, borrow_from_accumulator, operands

torch = pytest.importorskip("torch")
pytest.importorskip("mmasim")
pytest.importorskip("ninja", reason="mmasim compiles its FMA with ninja")

MFMA_CDNA3 = {
    "float32": "f32_32x32x2_f32",
    "tfloat32": "f32_32x32x4_xf32",
    "bfloat16": "f32_32x32x8_bf16",
    "float16": "f32_32x32x8_f16",
    "float8_e4m3fnuz": "f32_16x16x32_fp8_fp8",
}
INSTRUCTIONS = {
    "fma32-seq": ("CDNA3", {"float32": "f32_32x32x2_f32"}),
    "mfma-cdna3-g8": ("CDNA3", MFMA_CDNA3),
    "mfma-cdna2": (
        "CDNA2",
        {"float32": "f32_32x32x2f32", "bfloat16": "f32_32x32x8bf16_1k", "float16": "f32_32x32x8f16"},
    ),
    "mfma-cdna1": ("CDNA1", {"float32": "f32_32x32x2f32", "bfloat16": "f32_32x32x4bf16", "float16": "f32_32x32x8f16"}),
    "hopper-k16": (
        "Hopper",
        {
            "tfloat32": "m64n8k8.f32.tf32.tf32",
            "bfloat16": "m64n8k16.f32.bf16.bf16",
            "float16": "m64n8k16.f32.f16.f16",
            "float8_e4m3fn": "m64n8k32.f32.e4m3.e4m3",
            "float8_e5m2": "m64n8k32.f32.e5m2.e5m2",
        },
    ),
    "ampere-k8": (
        "Ampere",
        {
            "tfloat32": "m16n8k8.f32.tf32.tf32.f32",
            "bfloat16": "m16n8k16.f32.bf16.bf16.f32",
            "float16": "m16n8k16.f32.f16.f16.f32",
        },
    ),
}
CASES = [(unit, name) for unit, (_, names) in INSTRUCTIONS.items() for name in names]
DTYPES = {name: getattr(torch, "float32" if name == "tfloat32" else name) for name in FORMATS}


@cache
def simulator(unit: str, input_format: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mmasim.amd.sim import MFMA  # type: ignore[import-untyped]
        from mmasim.nv_ptx.sim import MMA, WGMMA  # type: ignore[import-untyped]

    architecture, names = INSTRUCTIONS[unit]
    kind = {"Hopper": WGMMA, "Ampere": MMA}.get(architecture, MFMA)
    return kind(architecture, names[input_format])


def test_every_unit_and_format_has_an_instruction() -> None:
    missing = {(unit, name) for unit in UNITS for name in UNITS[unit].input_formats} - set(CASES)
    assert {unit for unit, _ in missing} <= {
        "fma32-seq",  # a float32 FMA whatever the format of its inputs
        "amx-bf16",  # of a CPU, which mmasim does not have
    }


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_mmasim_too_keeps_32_bits_below_the_accumulator(sign: float) -> None:
    a, b, c = borrow_from_accumulator(sign)
    left, right = torch.from_numpy(a).bfloat16(), torch.from_numpy(b).bfloat16()
    theirs = simulator("mfma-cdna3-g8", "bfloat16")(left, right, torch.from_numpy(c)).numpy()
    assert_same_bits(dot(a, b, c, unit="mfma-cdna3-g8", input_format="bfloat16"), theirs)


@pytest.mark.parametrize(("unit", "input_format"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_mmasim(unit: str, input_format: str, kind: str) -> None:
    finite = 0.0
    for seed, depth in enumerate((16, 64)):
        # special operands would make every long sum NaN
        K = 32 if FORMATS[input_format].bits == 8 else 16 if kind == "special" else depth
        shape = (24, K, 20)
        a, b, c = operands(kind, FORMATS[input_format], shape, seed)
        ours = dot(a, b, c, unit=unit, input_format=input_format)
        left, right = (torch.from_numpy(np.ascontiguousarray(x)).to(DTYPES[input_format]) for x in (a, b))
        instruction = simulator(unit, input_format)
        theirs = torch.from_numpy(c)
        for k in range(0, shape[1], instruction.k):
            theirs = instruction(left[:, k : k + instruction.k], right[k : k + instruction.k], theirs)
        assert_same_bits(ours, theirs.numpy())
        finite += float(np.isfinite(ours).mean()) / 2
    assert finite > 0.02, "all results are infinite or NaN: the operands test nothing"
