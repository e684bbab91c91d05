"""Matrix products as the matrix units compute them: `dot`, and the units by name.

Each output element depends on its row of `a`, its column of `b` and its `c` alone, not on the place in a tile.
"""

from __future__ import annotations

import numpy as np

from reference.checks import Float32Array, require_choice, require_float32
from reference.dot import ampere_k8, amx_bf16, fma32_seq, hopper_k16, mfma_cdna1, mfma_cdna2, mfma_cdna3_g8
from reference.dot.extent import extent
from reference.dot.memory import recalled, remember
from reference.dot.unit import MatrixUnit
from reference.formats import FORMATS, Format, encode

#: Every unit by the name that a contract carries.
UNITS: dict[str, MatrixUnit] = {
    module.UNIT.name: module.UNIT
    for module in (fma32_seq, mfma_cdna3_g8, mfma_cdna2, mfma_cdna1, hopper_k16, ampere_k8, amx_bf16)
}


def dot(
    a: Float32Array,
    b: Float32Array,
    c: Float32Array | None = None,
    *,
    unit: str = "fma32-seq",
    input_format: str = "float32",
) -> Float32Array:
    """c + a @ b, bit for bit as `unit` computes it along ascending K.

    Args:
        a: float32 [M, K], every value in `input_format`.
        b: float32 [K, N], likewise.
        c: float32 [M, N], the accumulator's start; None is +0.
        unit: a key of `UNITS`.
        input_format: a key of `reference.formats.FORMATS` that the unit takes.

    Returns:
        float32 [M, N].

    Raises:
        TypeError: an operand is not a native float32 array.
        ValueError: shapes do not fit; unknown unit; a format the unit does not take; a value outside the format.
    """
    require_choice(unit, "unit", tuple(UNITS))
    require_choice(input_format, f"input_format of {unit}", UNITS[unit].input_formats)
    left, right = require_float32(a, "a"), require_float32(b, "b")
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        raise ValueError(f"a, b: expected shapes [M, K] and [K, N], got {left.shape} and {right.shape}")
    shape = (left.shape[0], right.shape[1])
    start = np.zeros(shape, np.float32) if c is None else require_float32(c, "c")
    if start.shape != shape:
        raise ValueError(f"c: expected shape {shape}, got {start.shape}")
    fmt = FORMATS[input_format]
    _require_values_in(left, "a", fmt)
    _require_values_in(right, "b", fmt)
    name = f"{unit} {input_format}"
    return recalled(name, (left, right, start), lambda: UNITS[unit].accumulate(left, right, start, fmt))


def _require_values_in(x: Float32Array, argument: str, fmt: Format) -> None:
    if fmt.exponent_bits == 8 and extent(x).trailing_zeros >= 23 - fmt.mantissa_bits:
        return  # quick: the format is a prefix of float32, and nothing lies beyond it
    try:
        encode(x, fmt)
    except ValueError as error:
        raise ValueError(f"{argument}: {str(error).removeprefix('x: ')}") from None


__all__ = ["UNITS", "MatrixUnit", "dot", "remember"]
