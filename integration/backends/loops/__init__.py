"""The reference operators of `strict-v1/fma32-seq` with compiled loops: the same signatures, the same bits, faster.

The reference interprets any contract with one NumPy call per element of the reduction, which costs more than the
arithmetic when a decode step has eight rows. These functions know one contract each and hand everything else to the
reference. Tests compare the two in bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from integration.backends.loops import compiled
from reference import operators as ops
from reference.checks import Float32Array
from reference.contract.profiles import profile
from reference.operators import (
    LogsumexpResult,
    embedding,
    logprob,
    processed_logits,
    residual_add,
    rope_table,
    row_linear_merge,
    to_cache,
)
from reference.operators.attention import AttentionResult
from reference.operators.attention import attention_result as reference_result
from reference.operators.kv_cache import KeyValues
from reference.operators.linear import finish
from reference.operators.logsumexp import row_maximum, segment_sum, shifted_logits
from reference.primitives import PRIMITIVES

__all__ = [
    "LogsumexpResult",
    "attention",
    "attention_result",
    "embedding",
    "gather_blocks",
    "linear",
    "lm_head",
    "logprob",
    "logsumexp",
    "processed_logits",
    "qk_norm",
    "residual_add",
    "rms_norm",
    "rope",
    "rope_table",
    "row_linear_merge",
    "row_linear_partial",
    "swiglu",
    "to_cache",
]
LOG2E = float.fromhex("0x1.71547652b82fep+0")
_PROFILE = profile("strict-v1/fma32-seq")
#: Contracts that the loops follow, of all dtypes.
_KNOWN = {
    (name, dtype): _PROFILE.contract(name, dtype).contract_id
    for name in ("linear", "row_linear", "lm_head", "attention", "rms_norm", "qk_norm", "rope", "swiglu", "logsumexp")
    for dtype in ("bfloat16", "float32")
}


#: Contracts that were looked at, by identity: hashing one costs more than the work of a small operator.
_seen: dict[int, tuple[Any, bool]] = {}


def _follows(contract: Any) -> bool:
    """Whether the loops follow ``contract``."""
    known = _seen.get(id(contract))
    if known is None:
        known = _seen[id(contract)] = contract, _is_known(contract)
    return known[1]


def _is_known(contract: Any) -> bool:
    dtype = "bfloat16" if contract.rounding.output == "bfloat16" else "float32"
    if contract.operator == "lm_head":
        dtype = contract.domain.input
    return bool(_KNOWN.get((contract.operator, dtype)) == contract.contract_id)


def linear(x: Float32Array, weight: Float32Array, contract: Any, bias: Float32Array | None = None) -> Float32Array:
    """As `reference.operators.linear`; fastest for a ``weight`` in Fortran order."""
    if not _follows(contract):
        return ops.linear(x, weight, contract, bias)
    return finish(_chains(x, weight, 1)[0], contract, bias)


def lm_head(x: Float32Array, weight: Float32Array, contract: Any) -> Float32Array:
    """As `reference.operators.lm_head`."""
    return finish(_chains(x, weight, 1)[0], contract, None) if _follows(contract) else ops.lm_head(x, weight, contract)


def row_linear_partial(x: Float32Array, weight: Float32Array, contract: Any, ranks: int) -> Float32Array:
    """As `reference.operators.row_linear_partial`, without a bias in the accumulator."""
    segments = contract.partition.segments
    if not _follows(contract) or segments % ranks or x.shape[1] % (segments // ranks):
        return ops.row_linear_partial(x, weight, contract, ranks)
    parts: Sequence[Float32Array] = list(_chains(x, weight, segments // ranks))
    with np.errstate(all="ignore"):
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _chains(x: Float32Array, weight: Float32Array, segments: int) -> Float32Array:
    out = np.zeros((segments, x.shape[0], weight.shape[0]), np.float32)
    rows, columns = np.ascontiguousarray(x.T), np.ascontiguousarray(weight.T)
    width = x.shape[1] // segments
    for segment in range(segments):
        here = slice(segment * width, (segment + 1) * width)
        compiled.chain_on(rows[here], columns[here], out[segment])
    return out


def attention(
    q: Float32Array, positions: NDArray[np.int64], kv: KeyValues, contract: Any, *, scale: float | None = None
) -> Float32Array:
    """As `reference.operators.attention`."""
    if not _follows(contract) or not len(q):
        return ops.attention(q, positions, kv, contract, scale=scale)
    return attention_result(q, positions, kv, contract, scale=scale).output


def attention_result(
    q: Float32Array, positions: NDArray[np.int64], kv: KeyValues, contract: Any, *, scale: float | None = None
) -> AttentionResult:
    """As `reference.operators.attention.attention_result`."""
    if not _follows(contract):
        return reference_result(q, positions, kv, contract, scale=scale)
    keys, values = (np.ascontiguousarray(part) for part in kv.read(0, int(positions.max()) + 1))
    out = np.empty(q.shape, np.float32)
    factor = np.float32((1.0 / math.sqrt(q.shape[2]) if scale is None else scale) * LOG2E)
    narrow = contract.rounding.probabilities == "bfloat16"
    statistics = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
    compiled.attend(np.ascontiguousarray(q), positions, keys, values, factor, narrow, out, *statistics)
    return AttentionResult(_narrow(out, contract), *statistics)


def gather_blocks(
    cache: NDArray[Any], blocks: NDArray[np.int64], start: int, stop: int
) -> tuple[Float32Array, Float32Array]:
    """Keys and values of tokens [start, stop) of a sequence in ``blocks`` of a paged cache.

    Args:
        cache: bit patterns, [blocks, KV heads, block size, 2 * head_dim]: uint16 of bfloat16, or uint32 of float32.

    Returns:
        float32, [stop - start, KV heads, head_dim] each.
    """
    shape = (stop - start, cache.shape[1], cache.shape[3] // 2)
    keys, values = np.empty(shape, np.uint32), np.empty(shape, np.uint32)
    compiled.gather(cache, blocks, start, keys, values)
    return keys.view(np.float32), values.view(np.float32)


def rms_norm(x: Float32Array, weight: Float32Array, epsilon: float, contract: Any) -> ops.RmsNormResult:
    """As `reference.operators.rms_norm` without a residual."""
    if not _follows(contract):
        return ops.rms_norm(x, weight, epsilon, contract)
    return ops.RmsNormResult(_normalise(x, weight, epsilon, contract), None)


def qk_norm(x: Float32Array, weight: Float32Array, epsilon: float, contract: Any) -> Float32Array:
    """As `reference.operators.qk_norm`."""
    if not _follows(contract):
        return ops.qk_norm(x, weight, epsilon, contract)
    return _normalise(x.reshape(-1, x.shape[-1]), weight, epsilon, contract).reshape(x.shape)


def _normalise(x: Float32Array, weight: Float32Array, epsilon: float, contract: Any) -> Float32Array:
    out = np.empty(x.shape, np.float32)
    compiled.normalise(np.ascontiguousarray(x), np.ascontiguousarray(weight), np.float32(epsilon), out)
    return _narrow(out, contract)


def rope(x: Float32Array, table: ops.RopeTable, contract: Any) -> Float32Array:
    """As `reference.operators.rope`."""
    if not _follows(contract):
        return ops.rope(x, table, contract)
    out = np.empty(x.shape, np.float32)
    compiled.rotate(np.ascontiguousarray(x), table.cos, table.sin, out)
    return _narrow(out, contract)


def swiglu(gate: Float32Array, up: Float32Array, contract: Any) -> Float32Array:
    """As `reference.operators.swiglu`."""
    if not _follows(contract):
        return ops.swiglu(gate, up, contract)
    out = np.empty(gate.shape, np.float32)
    compiled.gated(np.ascontiguousarray(gate).reshape(-1), np.ascontiguousarray(up).reshape(-1), out.reshape(-1))
    return _narrow(out, contract)


def logsumexp(logits: Float32Array, contract: Any) -> LogsumexpResult:
    """As `reference.operators.logsumexp`, but for the exponentials its own functions."""
    if not _follows(contract):
        return ops.logsumexp(logits, contract)
    maximum = row_maximum(logits)
    terms = np.empty(logits.shape, np.float32)
    compiled.exponentials(shifted_logits(logits, maximum, contract).reshape(-1), terms.reshape(-1))
    total = segment_sum(terms, contract)
    with np.errstate(all="ignore"):
        return LogsumexpResult(maximum + PRIMITIVES["log"][contract.primitives.log](total), maximum, total)


def _narrow(out: Float32Array, contract: Any) -> Float32Array:
    """The output rounding, in place."""
    if contract.rounding.output == "bfloat16":
        compiled.round_bfloat16(out)
    return out
