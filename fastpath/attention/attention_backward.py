"""Gradients of attention over packed sequences, deterministic: no atomics, every sum in a fixed order."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton

from fastpath._tensors import accepted, require_rows
from fastpath.attention._backward_kernels import delta_kernel, key_gradient_kernel, query_gradient_kernel
from fastpath.attention._kernel import MATRIX
from fastpath.attention.attention import (
    AttentionResult,
    Packed,
    Tile,
    folded_scale,
    matrix_step,
    require_keys,
)
from fastpath.backend import UnsupportedError, current_target, launch, require_fields, require_tensor
from reference.gradients import AttentionBackwardContract

IMPLEMENTED = (
    ("domain.mask", ("causal", "full")),
    ("order.rows", "tokens"),
    ("order.keys", "ascending"),
    ("order.delta", "lanes-tree-256"),
    ("primitives.exp", "exp2-nonpositive"),
    ("primitives.normalise", "reciprocal"),
)


class AttentionGradients(NamedTuple):
    """Gradients of the queries, keys and values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attention_backward(
    grad_output: torch.Tensor,
    q: torch.Tensor,
    query_starts: torch.Tensor,
    most_queries: int,
    kv: Packed,
    most_keys: int,
    result: AttentionResult,
    contract: AttentionBackwardContract,
    *,
    scale: float | None = None,
) -> AttentionGradients:
    """Gradients from the forward pass's ``result`` (``save=True``), each rounded once; finite operands:
    `reference.gradients.attention`.

    Args:
        grad_output: [tokens, heads, head_dim], contiguous.
        most_queries, most_keys: the largest number of queries, and of keys, of a sequence.

    Raises:
        UnsupportedError, TypeError, ValueError: as :func:`fastpath.attention.attention`; ``result`` without statistics.
    """
    dtype = accepted(contract, IMPLEMENTED, "rounding.input")
    _require_formats(contract)
    require_rows(q, "q", "tokens, heads, head_dim", dtype)
    tokens, heads, head_dim = q.shape
    require_tensor(grad_output, "grad_output", f"tokens={tokens}, heads={heads}, head_dim={head_dim}", dtype)
    kv_heads = require_keys(kv, head_dim, dtype)
    if result.maxima is None or result.sums is None:
        raise ValueError("result: lacks maxima and sums; call attention with save=True")
    grad_q = torch.empty(q.shape, dtype=dtype, device=q.device)
    gradients = AttentionGradients(grad_q, torch.empty_like(kv.keys), torch.empty_like(kv.values))
    if not tokens:
        return AttentionGradients(grad_q, gradients.k.zero_(), gradients.v.zero_())
    deltas = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    rows = 1024 // head_dim
    sizes = {"contract": contract, "D": head_dim}
    grid = (triton.cdiv(tokens * heads, rows),)
    launch(delta_kernel, grid, grad_output, result.output, deltas, tokens * heads, **sizes, ROWS=rows)
    group, sequences, step = heads // kv_heads, query_starts.shape[0] - 1, matrix_step(contract)
    operands = (q, kv.keys, kv.values, grad_output, result.maxima, result.sums, deltas, query_starts, kv.starts)
    factor = float(np.float32(1.0 / math.sqrt(head_dim) if scale is None else scale))
    numbers = (q.stride(0), folded_scale(scale, head_dim), factor)
    tile = gradient_tile(step, head_dim)
    sizes |= {"GROUP": group, "KV_HEADS": kv_heads, "CAUSAL": contract.domain.mask == "causal"}
    sizes |= {"STEP": step, "ROWS": tile.rows, "options": {"num_warps": tile.warps, "num_stages": tile.stages}}
    grid_q = (triton.cdiv(most_queries * group, tile.rows), kv_heads, sequences)
    launch(query_gradient_kernel, grid_q, *operands, grad_q, *numbers, **sizes)
    grid_k = (triton.cdiv(most_keys, 64), kv_heads, sequences)
    # the registers hold both accumulators where the matrix unit takes narrow operands
    for wanted in [(True, True)] if step == MATRIX else [(True, False), (False, True)]:
        sizes |= {"WANT_K": wanted[0], "WANT_V": wanted[1]}
        launch(key_gradient_kernel, grid_k, *operands, gradients.k, gradients.v, *numbers, **sizes)
    return gradients


@lru_cache(maxsize=64)
def _require_formats(contract: AttentionBackwardContract) -> None:
    """Refuse formats that are not the output's.

    Raises:
        UnsupportedError: naming the field.
    """
    dtype = str(contract.get("rounding.input"))
    require_fields(contract, {"domain.input": dtype, "rounding.probabilities": dtype, "rounding.scores": dtype})


def gradient_tile(step: int, head_dim: int) -> Tile:
    """Query rows of a step, and how it is compiled; no field can change a bit.

    Raises:
        UnsupportedError: accumulators that the registers do not hold.
    """
    if current_target().runtime == "hip":
        if step != MATRIX and head_dim > 128:
            raise UnsupportedError(f"head_dim: gradients of {head_dim} under fma32-seq do not fit gfx942's registers")
        return Tile(16 if step != MATRIX or head_dim > 128 else 32, 4, 1)
    if step != MATRIX or head_dim > 128:
        return Tile(16, 8, 1)
    return Tile(64, 4, 2) if head_dim <= 64 else Tile(32, 8, 2)
