"""`mfma-cdna2`: gfx90a MFMA (MI200), groups of 4, subnormals flushed, ordinary additions."""

from __future__ import annotations

import numpy as np

from reference.arithmetic import flush_subnormals
from reference.checks import Float32Array
from reference.dot import fma32_seq
from reference.dot.unit import MatrixUnit
from reference.formats import Format

#: Consecutive k of one sum of products.
GROUP = 4
#: Consecutive k of one instruction, which flushes C once.
INSTRUCTION = 8


def accumulate(a: Float32Array, b: Float32Array, c: Float32Array, input_format: Format) -> Float32Array:
    """c + a @ b as gfx90a MFMA along ascending K: float32 a [M, K], b [K, N], c [M, N]."""
    if input_format.name == "float32":
        return fma32_seq.accumulate(a, b, c, input_format)
    left, right = _flush_to_positive_zero(a, input_format), _flush_to_positive_zero(b, input_format)
    missing = -a.shape[1] % INSTRUCTION
    left, right = np.pad(left, ((0, 0), (0, missing))), np.pad(right, ((0, missing), (0, 0)))
    result = c
    with np.errstate(all="ignore"):
        for k in range(0, left.shape[1], GROUP):
            products = [flush_subnormals(left[:, i, None] * right[i]) for i in range(k, k + GROUP)]
            pairs = [flush_subnormals(products[i] + products[i + 1]) for i in (0, 2)]
            if k % INSTRUCTION == 0:
                result = _flush_to_positive_zero(result, input_format=None)
            result = flush_subnormals(result + flush_subnormals(pairs[0] + pairs[1]))
    return np.array(result, np.float32)


def _flush_to_positive_zero(x: Float32Array, input_format: Format | None) -> Float32Array:
    """Operands lose the sign of a flushed subnormal, and of a zero; results of additions keep it."""
    smallest = np.float32(2.0**-126 if input_format is None else input_format.min_normal)
    return np.where(np.abs(x) < smallest, np.float32(0), x)


UNIT = MatrixUnit(
    name="mfma-cdna2",
    hardware="gfx90a v_mfma_f32_32x32x8bf16_1k, 32x32x8f16, f32",
    input_formats=("float32", "bfloat16", "float16"),
    arithmetic="operands flushed; (p0 + p1) + (p2 + p3), then + C, each rounded to nearest even and flushed",
    evidence="modelled, equal to mmasim 2.1.1",
    accumulate=accumulate,
)
