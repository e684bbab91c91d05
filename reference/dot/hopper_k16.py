"""`hopper-k16`: sm_90 `mma.sync` and `wgmma`, groups of 32 bytes of each operand: 16 bfloat16 or float16 values."""

from __future__ import annotations

from reference.dot.nvidia import FusedSum, fused_accumulate
from reference.dot.unit import MatrixUnit
from reference.formats import Format


def parameters(input_format: Format) -> FusedSum:
    """The fused sum of one `wgmma`: for 8-bit inputs the sum and its result keep 13 bits only."""
    if input_format.bits == 8:
        return FusedSum(group=32, fraction_bits=13, zero_exponent=-133, result_bits=13)
    return FusedSum(group=8 if input_format.name == "tfloat32" else 16, fraction_bits=25, zero_exponent=-133)


UNIT = MatrixUnit(
    name="hopper-k16",
    hardware="sm_90 mma.sync and wgmma k16 (bfloat16, float16), wgmma k8 (tfloat32) and k32 (8-bit)",
    input_formats=("tfloat32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    arithmetic="16 products and C aligned, 25 fractional bits toward zero, exact sum, round toward zero",
    evidence="bfloat16 measured on one H200 (0 of 131,072 outputs differ); others modelled, equal to mmasim 2.1.1",
    accumulate=fused_accumulate(parameters),
)
