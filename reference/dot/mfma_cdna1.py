"""`mfma-cdna1`: gfx908 MFMA (MI100): an exact sum of C and 2 (bfloat16) or 4 (float16) products, rounded once."""

from __future__ import annotations

import numpy as np

from reference.arithmetic import Float64Array, add_round_to_odd, two_sum
from reference.checks import Float32Array
from reference.dot import fma32_seq
from reference.dot.unit import MatrixUnit
from reference.formats import Format

#: Consecutive k of one step, by format.
GROUPS = {"bfloat16": 2, "float16": 4}


def accumulate(a: Float32Array, b: Float32Array, c: Float32Array, input_format: Format) -> Float32Array:
    """c + a @ b as gfx908 MFMA along ascending K: float32 a [M, K], b [K, N], c [M, N]."""
    if input_format.name == "float32":
        return fma32_seq.accumulate(a, b, c, input_format)
    group = GROUPS[input_format.name]
    missing = -a.shape[1] % group
    result = c
    with np.errstate(all="ignore"):
        left = np.pad(a.astype(np.float64), ((0, 0), (0, missing)))
        right = np.pad(b.astype(np.float64), ((0, missing), (0, 0)))
        for k in range(0, left.shape[1], group):
            products = [left[:, i, None] * right[i] for i in range(k, k + group)]  # exact
            result = round_exact_sum([*products, result.astype(np.float64)])
    return np.array(result, np.float32)


def round_exact_sum(terms: list[Float64Array]) -> Float32Array:
    """The exact sum of float64 arrays, rounded once to float32; infinities and NaN as in any order of addition.

    The terms become a non-overlapping expansion (Shewchuk 1997, grow-expansion), which sums from its smallest component
    with rounding to odd: what is lost below stays visible in the last bit (Boldo and Melquiond 2008).
    """
    plain = terms[0]
    for term in terms[1:]:
        plain = plain + term
    expansion: list[Float64Array] = []
    for term in terms:
        carry = term
        for i, component in enumerate(expansion):
            carry, expansion[i] = two_sum(carry, component)
        expansion.append(carry)
    total = expansion[0]
    for component in expansion[1:]:
        total = add_round_to_odd(component, total)
    return np.where(np.isfinite(plain), total, plain).astype(np.float32)


UNIT = MatrixUnit(
    name="mfma-cdna1",
    hardware="gfx908 v_mfma_f32_32x32x4bf16, 32x32x8f16, f32",
    input_formats=("float32", "bfloat16", "float16"),
    arithmetic="C and 2 (bfloat16) or 4 (float16) products summed exactly, rounded once to nearest even",
    evidence="modelled, equal to mmasim 2.1.1",
    accumulate=accumulate,
)
