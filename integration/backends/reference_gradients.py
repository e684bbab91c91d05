"""`reference.gradients` as the back ends call it: sums are added to in place, since they are as large as the model."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import gradients as spec
from reference.checks import Float32Array
from reference.gradients import (
    attention_backward,
    linear_input_merge,
    linear_input_partial,
    logprob_backward,
    processed_logits_backward,
    rope_backward,
    swiglu_backward,
)

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


def linear_weight_gradient(grad: Float32Array, x: Float32Array, contract: Any, sums: Float32Array) -> None:
    """As `reference.gradients.linear_weight_gradient`, into ``sums``; [sequences, tokens, ...], any strides."""
    sums[...] = spec.linear_weight_gradient(grad, x, contract, sums)


def bias_gradient(grad: Float32Array, contract: Any, sums: Float32Array) -> None:
    """As `reference.gradients.bias_gradient`, into ``sums``; ``grad`` is [tokens, sequences, outputs]."""
    sums[...] = spec.bias_gradient(np.ascontiguousarray(grad.swapaxes(0, 1)), contract.partition.rows, sums)


def norm_backward(
    grad: Float32Array, x: Float32Array, weight: Float32Array, epsilon: float, contract: Any, sums: Float32Array
) -> Float32Array:
    """As `reference.gradients.qk_norm_backward` on [tokens, sequences, heads, n], the weight's gradient into ``sums``
    [heads, n]; the norm of hidden states has one head. Returns the gradient of ``x``."""
    dy, rows = (np.ascontiguousarray(part.swapaxes(0, 1)) for part in (grad, x))
    if contract.operator == "qk_norm_backward":
        found = spec.qk_norm_backward(dy, rows, weight, epsilon, contract, sums)
        sums[...] = found.weight
        return found.x.swapaxes(0, 1)
    found = spec.rms_norm_backward(dy[:, :, 0], rows[:, :, 0], weight, epsilon, contract, sums[0])
    sums[0] = found.weight
    return found.x[:, :, None].swapaxes(0, 1)


def embedding_backward(grad: Float32Array, tokens: NDArray[np.int64], contract: Any, sums: Float32Array) -> None:
    """As `reference.gradients.embedding_backward`, into ``sums``."""
    sums[...] = spec.embedding_backward(grad, tokens, sums.shape[0], contract, sums)
