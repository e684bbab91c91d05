"""`ampere-k8`: sm_80 `mma.sync`, groups of 16 bytes of each operand: 8 bfloat16 or float16 values."""

from __future__ import annotations

from reference.dot.nvidia import FusedSum, fused_accumulate
from reference.dot.unit import MatrixUnit
from reference.formats import Format


def parameters(input_format: Format) -> FusedSum:
    """The fused sum of half an `mma.sync` m16n8k16."""
    return FusedSum(group=4 if input_format.name == "tfloat32" else 8, fraction_bits=24, zero_exponent=-132)


UNIT = MatrixUnit(
    name="ampere-k8",
    hardware="sm_80 mma.sync m16n8k16 (bfloat16, float16), two groups of 8; m16n8k8 (tfloat32), two groups of 4",
    input_formats=("tfloat32", "bfloat16", "float16"),
    arithmetic="8 products and C aligned, 24 fractional bits toward zero, exact sum, round toward zero",
    evidence="modelled, equal to mmasim 2.1.1",
    accumulate=fused_accumulate(parameters),
)
