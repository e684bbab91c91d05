"""`amx-bf16`: Intel's tile unit (Sapphire Rapids and later), two chains over 32 consecutive K, subnormals flushed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.arithmetic import flush_subnormals, fused_multiply_add
from reference.checks import Float32Array
from reference.dot.tiles import tiles
from reference.dot.unit import MatrixUnit
from reference.formats import Format

#: Consecutive k of one instruction: a tile row of 64 bytes, in pairs.
GROUP = 32


def accumulate(a: Float32Array, b: Float32Array, c: Float32Array, input_format: Format) -> Float32Array:
    """c + a @ b as TDPBF16PS along ascending K: float32 a [M, K], b [K, N], c [M, N].

    Source: the instruction's pseudocode in Intel's Software Developer's Manual, volume 2.
    """
    missing = -a.shape[1] % GROUP
    result = np.array(c, np.float32)
    with np.errstate(all="ignore"):
        left = flush_subnormals(np.pad(a, ((0, 0), (0, missing)))).astype(np.float64)
        right = flush_subnormals(np.pad(b, ((0, missing), (0, 0)))).astype(np.float64)
        for rows, columns in tiles(*result.shape):
            result[rows, columns] = _tile(left[rows], right[:, columns], result[rows, columns])
    return result


def _tile(a: NDArray[np.float64], b: NDArray[np.float64], c: Float32Array) -> Float32Array:
    """One tile of the output; a [M, K] and b [K, N] hold float32 values, K a multiple of the group."""
    for first in range(0, a.shape[1], GROUP):
        chains = []
        for odd in (0, 1):
            chain = np.zeros_like(c)
            for k in range(first + odd, first + GROUP, 2):
                chain = flush_subnormals(fused_multiply_add(a[:, k, None], b[k], chain))
            chains.append(chain)
        c = flush_subnormals(flush_subnormals(c) + flush_subnormals(chains[0] + chains[1]))
    return c


UNIT = MatrixUnit(
    name="amx-bf16",
    hardware="Intel AMX, TDPBF16PS",
    input_formats=("bfloat16",),
    arithmetic="32 products as an even and an odd FMA chain from +0; their sum, then + C; nearest even, all flushed",
    evidence="modelled after Intel's pseudocode; no processor with AMX has been at hand",
    accumulate=accumulate,
)
