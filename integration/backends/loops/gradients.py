"""The reference's gradients with compiled loops, for the `strict-v1/fma32-seq` contracts: the same bits, faster.

Signatures are those of `integration.backends.reference_gradients`. Any other contract goes there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from integration.backends import reference_gradients as plain
from integration.backends.loops import compiled, compiled_gradients
from integration.backends.reference_gradients import linear_input_merge, processed_logits_backward
from reference import gradients as spec
from reference.checks import Float32Array
from reference.contract.profiles import profile
from reference.gradients import gradient_contracts
from reference.operators._numerics import narrow as rounded
from reference.operators._numerics import row_sum
from reference.operators._online_softmax import LOG2E
from reference.operators.attention import AttentionResult
from reference.operators.rope import RopeTable

__all__ = [
    "attention_backward",
    "bias_gradient",
    "embedding_backward",
    "linear_input_merge",
    "linear_input_partial",
    "linear_weight_gradient",
    "logprob_backward",
    "norm_backward",
    "processed_logits_backward",
    "rope_backward",
    "swiglu_backward",
]
_PROFILE = profile("strict-v1/fma32-seq")
#: Contracts that the kernels follow.
_KNOWN = {c.contract_id for dtype in ("bfloat16", "float32") for c in gradient_contracts(_PROFILE, dtype).values()}
#: Contracts that were looked at, by identity: hashing one costs more than the work of a small operator.
_seen: dict[int, tuple[Any, bool]] = {}


def follows(contract: Any) -> bool:
    """Whether the kernels follow ``contract``."""
    known = _seen.get(id(contract))
    if known is None:
        known = _seen[id(contract)] = contract, contract.contract_id in _KNOWN
    return known[1]


def linear_input_partial(
    grad: Float32Array, weight: Float32Array, contract: Any, ranks: int, *, joined: int = 1
) -> Float32Array:
    """As `reference.gradients.linear_input_partial`."""
    if not follows(contract):
        return plain.linear_input_partial(grad, weight, contract, ranks, joined=joined)
    segments = spec.rank_segments(grad.shape[1], contract.partition.segments, ranks, joined)
    width = grad.shape[1] // (segments * joined)
    dy = rounded(grad, contract.domain.input)
    parts = []
    for segment in range(segments):
        total = np.zeros((grad.shape[0], weight.shape[1]), np.float32)
        for projection in range(joined):
            first = (projection * segments + segment) * width
            here = slice(first, first + width)
            compiled.chain_on(np.ascontiguousarray(dy[:, here].T), np.ascontiguousarray(weight[here]), total)
        parts.append(total)
    with np.errstate(all="ignore"):
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def linear_weight_gradient(grad: Float32Array, x: Float32Array, contract: Any, sums: Float32Array) -> None:
    """As `reference.gradients.linear_weight_gradient`, into ``sums``; [sequences, tokens, ...], any strides."""
    if not follows(contract):
        plain.linear_weight_gradient(grad, x, contract, sums)
        return
    for dy, rows in zip(rounded(grad, contract.domain.input), x, strict=True):
        compiled.chain_on(np.ascontiguousarray(dy), np.ascontiguousarray(rows), sums)


def bias_gradient(grad: Float32Array, contract: Any, sums: Float32Array) -> None:
    """As `reference.gradients.bias_gradient`, into ``sums``; ``grad`` is [tokens, sequences, outputs]."""
    if not follows(contract):
        plain.bias_gradient(grad, contract, sums)
        return
    grad = np.ascontiguousarray(grad)
    ones = np.ones_like(grad)[:, :, None]
    compiled_gradients.add_rows(grad[:, :, None], ones, contract.partition.rows, sums[None])


def norm_backward(
    grad: Float32Array, x: Float32Array, weight: Float32Array, epsilon: float, contract: Any, sums: Float32Array
) -> Float32Array:
    """As `integration.backends.reference_gradients.norm_backward`."""
    if not follows(contract):
        return plain.norm_backward(grad, x, weight, epsilon, contract, sums)
    n = x.shape[-1]
    grad, x = np.ascontiguousarray(grad), np.ascontiguousarray(x)
    dx, normal = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    compiled_gradients.norm_slopes(
        grad.reshape(-1, n), x.reshape(-1, n), weight, np.float32(epsilon), dx.reshape(-1, n), normal.reshape(-1, n)
    )
    compiled_gradients.add_rows(grad, normal, contract.partition.rows, sums)
    return _narrow(dx, contract)


def rope_backward(grad: Float32Array, table: RopeTable, contract: Any) -> Float32Array:
    """As `reference.gradients.rope_backward`."""
    if not follows(contract):
        return plain.rope_backward(grad, table, contract)
    out = np.empty(grad.shape, np.float32)
    compiled.rotate(np.ascontiguousarray(grad), table.cos, -table.sin, out)
    return _narrow(out, contract)


def swiglu_backward(
    grad: Float32Array, gate: Float32Array, up: Float32Array, contract: Any
) -> tuple[Float32Array, Float32Array]:
    """As `reference.gradients.swiglu_backward`."""
    if not follows(contract):
        return plain.swiglu_backward(grad, gate, up, contract)
    of_gate, of_up = np.empty(grad.shape, np.float32), np.empty(grad.shape, np.float32)
    dy, g, u = (np.ascontiguousarray(part).reshape(-1) for part in (grad, gate, up))
    compiled_gradients.gate_slopes(dy, g, u, of_gate.reshape(-1), of_up.reshape(-1))
    return _narrow(of_gate, contract), _narrow(of_up, contract)


def embedding_backward(grad: Float32Array, tokens: NDArray[np.int64], contract: Any, sums: Float32Array) -> None:
    """As `reference.gradients.embedding_backward`, into ``sums``."""
    if not follows(contract):
        plain.embedding_backward(grad, tokens, contract, sums)
        return
    compiled_gradients.scatter(np.ascontiguousarray(grad).reshape(-1, grad.shape[-1]), tokens.reshape(-1), sums)


def logprob_backward(
    grad: Float32Array, logits: Float32Array, targets: NDArray[np.int64], value: Float32Array, contract: Any
) -> Float32Array:
    """As `reference.gradients.logprob_backward`."""
    if not follows(contract):
        return plain.logprob_backward(grad, logits, targets, value, contract)
    out = np.empty(logits.shape, np.float32)
    compiled_gradients.logprob_slopes(np.ascontiguousarray(logits), targets, value, np.ascontiguousarray(grad), out)
    return out


def attention_backward(
    grad: Float32Array,
    q: Float32Array,
    k: Float32Array,
    v: Float32Array,
    result: AttentionResult,
    contract: Any,
) -> spec.AttentionGradients:
    """As `reference.gradients.attention_backward` for one whole sequence."""
    if not follows(contract) or len(q) != len(k):
        return plain.attention_backward(grad, q, k, v, result, contract)
    grad, q, k, v = (np.ascontiguousarray(part) for part in (grad, q, k, v))
    found = spec.AttentionGradients(*(np.empty(part.shape, np.float32) for part in (q, k, v)))
    factor = 1.0 / math.sqrt(q.shape[2])
    with np.errstate(all="ignore"):
        delta = row_sum(grad * result.output, contract.order.delta)
    narrow = contract.rounding.scores == "bfloat16"
    scales = np.float32(factor * LOG2E), np.float32(factor)
    compiled_gradients.attend_back(grad, q, k, v, delta, result.maximum, result.total, *scales, narrow, *found)
    return spec.AttentionGradients(*(_narrow(part, contract) for part in found))


def _narrow(out: Float32Array, contract: Any) -> Float32Array:
    """The rounding of the input's gradient, in place."""
    if contract.rounding.input == "bfloat16":
        compiled.round_bfloat16(out)
    return out
