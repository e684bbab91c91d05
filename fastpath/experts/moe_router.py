# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Choice of experts for each token: `reference.operators.moe_router` as a Triton kernel.

A program takes a row. The largest logit and its place are one integer key, so the order of a maximum and the tie rule
(the lowest index) are exact whatever the order of comparisons.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastpath._tensors import TRITON_TYPES, accepted
from fastpath.backend import launch, require_tensor
from fastpath.primitives import div_rn, exp, narrow, ordered, pairs_tree, unordered
from fastpath.rows.rms_norm import lanes_of
from reference.operators.moe_router import MoeRouterContract

IMPLEMENTED = (
    ("order.softmax", ("before_top_k", "after_top_k")),
    ("order.renormalise", (True, False)),
    ("order.sum", "lanes-tree-256"),
    ("order.rank", "logits"),
    ("order.ties", "lowest_index"),
    ("rounding.logits", "float32"),
    ("rounding.scores", "float32"),
    ("primitives.exp", "rlk"),
)
#: Most experts, and most of them for a token: rows stay in registers, and the choice is unrolled.
MOST_EXPERTS, MOST_CHOSEN = 1024, 32


class MoeRouterResult(NamedTuple):
    """``experts``, int64, and ``weights``, [tokens, k] each, the largest weight first."""

    experts: torch.Tensor
    weights: torch.Tensor


@triton.jit
def lanes_sum(x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[1]: sum of nonnegative x [BLOCK] (padded with +0) over WIDTH lanes in ascending chunks, then a tree."""
    CHUNKS: tl.constexpr = BLOCK // WIDTH
    if CHUNKS == 1:
        return pairs_tree(tl.reshape(x, [1, WIDTH]), 1, WIDTH)
    else:
        chunks = tl.reshape(x, [CHUNKS, WIDTH])
        index = tl.arange(0, CHUNKS)
        lanes = tl.zeros([WIDTH], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            # one term and zeros: exact in any order
            lanes += tl.sum(tl.where(index[:, None] == chunk, chunks, 0.0), axis=0)
        return pairs_tree(tl.reshape(lanes, [1, WIDTH]), 1, WIDTH)


@triton.jit
def moe_router_kernel(
    logits,
    experts,
    weights,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    BEFORE: tl.constexpr,
    RENORMALISE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """experts[row, :K], weights[row, :K] from logits[row, :EXPERTS]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    inside = column < EXPERTS
    x = tl.load(logits + row * EXPERTS + column, mask=inside, other=float("-inf"))
    # + 0: zeros of both signs tie. The lower half grows as the index falls.
    key = (ordered(x + 0.0).to(tl.int64) << 32) + (BLOCK - 1 - column)
    maximum = unordered((tl.max(key, axis=0) >> 32).to(tl.int32))
    chosen = tl.full([SLOTS], float("-inf"), tl.float32)
    index = tl.zeros([SLOTS], tl.int64)
    for step in tl.static_range(K):
        best = tl.max(key, axis=0)
        place = BLOCK - 1 - (best & 0xFFFFFFFF)
        chosen = tl.where(slot == step, unordered((best >> 32).to(tl.int32)), chosen)
        index = tl.where(slot == step, place, index)
        key = tl.where(column == place, -(2**63), key)
    weight = tl.where(slot < K, exp(chosen - maximum), 0.0)
    if BEFORE:
        everything = lanes_sum(tl.where(inside, exp(x - maximum), 0.0), WIDTH, BLOCK)
        weight = tl.where(slot < K, div_rn(weight, tl.broadcast_to(everything, [SLOTS])), 0.0)
    if RENORMALISE:
        added = lanes_sum(weight, SLOT_WIDTH, SLOTS)
        weight = div_rn(weight, tl.broadcast_to(added, [SLOTS]))
    at = row * K + slot
    tl.store(experts + at, index, mask=slot < K)
    tl.store(weights + at, narrow(weight, DTYPE), mask=slot < K)


def moe_router(logits: torch.Tensor, k: int, contract: MoeRouterContract) -> MoeRouterResult:
    """The ``k`` experts of each token and their weights.

    Args:
        logits: float32, [tokens, experts], at most 1024 experts.
        k: experts per token, 1 to the number of experts, at most 32.

    Returns:
        Experts and weights. A row with a NaN, which the reference refuses, has NaN weights.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device; k or the number of experts out of range.
        UnsupportedError: a contract without a kernel.
    """
    dtype = accepted(contract, IMPLEMENTED, "rounding.weights")
    require_tensor(logits, "logits", "tokens, experts", torch.float32)
    tokens, number = logits.shape
    if not 1 <= k <= min(number, MOST_CHOSEN):
        raise ValueError(f"k: must be 1 to {min(number, MOST_CHOSEN)}, got {k}")
    if number > MOST_EXPERTS:
        raise ValueError(f"logits: {number} experts; the kernel takes at most {MOST_EXPERTS}")
    experts = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, k, dtype=dtype, device=logits.device)
    if tokens:
        launch(
            moe_router_kernel,
            (tokens,),
            *(logits, experts, weights),
            contract=contract,
            options={"num_warps": 1},
            EXPERTS=number,
            K=k,
            WIDTH=lanes_of(number),
            BLOCK=triton.next_power_of_2(number),
            SLOT_WIDTH=lanes_of(k),
            SLOTS=triton.next_power_of_2(k),
            BEFORE=contract.order.softmax == "before_top_k",
            RENORMALISE=contract.order.renormalise,
            DTYPE=TRITON_TYPES[dtype],
        )
    return MoeRouterResult(experts, weights)
