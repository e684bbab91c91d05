"""Strict functions as cases: what a test differentiates, with the operators of whatever back end it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from integration.backends import Operators
from integration.megatron import functions

Tensor = Any
Function = Callable[..., Tensor]
TOKENS, BATCH, HEADS, KV_HEADS, DIM, HIDDEN, VOCABULARY = 5, 2, 2, 1, 16, 24, 37
EPSILON, THETA, TEMPERATURE = 1e-5, 1e4, 0.7
POSITIONS = torch.arange(TOKENS)
IDS = torch.tensor([3, 1, 3, 0, 3])


def cases(own: Operators) -> dict[str, tuple[Function, list[tuple[int, ...]]]]:
    """Name -> (function of tensors that require gradients, their shapes)."""
    return {
        "embedding": (lambda table: functions.Embedding.apply(own, IDS, table, None, None), [(VOCABULARY, HIDDEN)]),
        "rms_norm": (
            lambda x, w: functions.RmsNorm.apply(own, x, w, EPSILON, False),
            [(TOKENS, BATCH, HIDDEN), (HIDDEN,)],
        ),
        "qk_norm": (
            lambda x, w: functions.RmsNorm.apply(own, x, w, EPSILON, True),
            [(TOKENS, BATCH, HEADS, DIM), (DIM,)],
        ),
        "linear": (
            lambda x, w, b: functions.Linear.apply(own, x, w, b, "linear", None),
            [(TOKENS, BATCH, HIDDEN), (24, HIDDEN), (24,)],
        ),
        "gate_up": (
            lambda x, w: functions.Linear.apply(own, x, w, None, "linear", None, 2),
            [(TOKENS, BATCH, HIDDEN), (32, HIDDEN)],
        ),
        "row_linear": (
            lambda x, w, b: functions.MergeRanks.apply(
                own, functions.Linear.apply(own, x, w, None, "row", None), b, None
            ),
            [(TOKENS, BATCH, HIDDEN), (24, HIDDEN), (24,)],
        ),
        "lm_head": (
            lambda x, w: functions.Linear.apply(own, x, w, None, "lm_head", None),
            [(TOKENS, BATCH, HIDDEN), (24, HIDDEN)],
        ),
        "rope": (lambda x: functions.Rope.apply(own, x, POSITIONS, THETA), [(TOKENS, HEADS, DIM)]),
        "residual_add": (lambda x, y: functions.ResidualAdd.apply(own, x, y), [(TOKENS, BATCH, HIDDEN)] * 2),
        "swiglu": (lambda g, u: functions.Swiglu.apply(own, g, u), [(TOKENS, BATCH, HIDDEN)] * 2),
        "attention": (
            lambda q, k, v: functions.Attention.apply(own, q, k, v),
            [(TOKENS, BATCH, HEADS, DIM), (TOKENS, BATCH, KV_HEADS, DIM), (TOKENS, BATCH, KV_HEADS, DIM)],
        ),
        "logprob": (
            lambda x: functions.LogProb.apply(
                own,
                functions.ProcessedLogits.apply(own, x, VOCABULARY - 3, (TEMPERATURE, None, None), None),
                IDS,
                lambda value: value,
            ),
            [(TOKENS, VOCABULARY)],
        ),
    }


def inputs(name: str, shapes: list[tuple[int, ...]], dtype: Any) -> list[Tensor]:
    """Normal values; logits are float32 whatever the model's dtype."""
    generator = torch.Generator().manual_seed(len(name))
    dtype = torch.float32 if name == "logprob" else dtype
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def gradients(function: Function, tensors: list[Tensor], direction: Tensor) -> list[Tensor]:
    """Gradients of the sum of the output times ``direction``."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    output = function(*leaves)
    output.backward(direction.to(output.dtype))
    return [leaf.grad for leaf in leaves]


def differing(left: Tensor, right: Tensor) -> int:
    """How many elements of two tensors differ in bits; NaN is a class."""
    assert left.shape == right.shape and left.dtype == right.dtype
    pattern = torch.int16 if left.dtype == torch.bfloat16 else torch.int32
    a, b = (x.contiguous().view(pattern) for x in (left, right))
    return int(np.count_nonzero(((a != b) & ~(left.isnan() & right.isnan())).numpy()))
