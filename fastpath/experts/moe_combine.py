# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Weighted sum of the experts' outputs: `reference.operators.moe_combine` as a Triton kernel.

A program takes one token and a block of features, and adds its experts in the contract's order; rows may lie where a
grouped product left them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath._tensors import INDEX_TYPES, TRITON_TYPES, accepted
from fastpath.backend import DTYPES, launch, require_tensor
from fastpath.primitives import narrow, widen
from reference.operators.moe_combine import MoeCombineContract

IMPLEMENTED = (
    ("order.experts", ("expert_index", "rank")),
    ("rounding.product", "float32"),
    ("primitives.accumulate", ("fma", "mul_add")),
)


@triton.jit
def moe_combine_kernel(
    outputs,
    weights,
    experts,
    places,
    out,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BY_INDEX: tl.constexpr,
    FUSED: tl.constexpr,
    PLACED: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row, block] = sum over the row's K experts of weight * output, from zero."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < HIDDEN
    slot = tl.arange(0, SLOTS)
    # an expert above all others where there is no slot; the slot itself breaks ties as a stable sort does
    expert = tl.load(experts + row * K + slot, mask=slot < K, other=2**31 - 1).to(tl.int64)
    key = expert * SLOTS + slot if BY_INDEX else slot.to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for _step in tl.static_range(K):
        least = tl.min(key, axis=0)
        at = row * K + least % SLOTS
        key = tl.where(key == least, 2**62, key)
        source = tl.load(places + at).to(tl.int64) if PLACED else at
        y = widen(tl.load(outputs + source * HIDDEN + feature, mask=inside, other=0.0))
        w = widen(tl.load(weights + at + tl.zeros([BLOCK], tl.int64)))
        total = tl.fma(y, w, total) if FUSED else total + y * w
    tl.store(out + row * HIDDEN + feature, narrow(total, DTYPE), mask=inside)


def moe_combine(
    outputs: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    contract: MoeCombineContract,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """One output per token.

    Args:
        outputs: bfloat16 or float32, [tokens, k, hidden]: what the chosen experts returned; with ``places``
            [rows, hidden], in any order.
        weights: bfloat16 or float32, [tokens, k].
        experts: integers, [tokens, k]: their indices.
        places: integers, [tokens, k]: the row of ``outputs`` of each choice.

    Returns:
        [tokens, hidden], of the contract's ``rounding.output``.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device of an argument.
        UnsupportedError: a contract without a kernel.
    """
    dtype = accepted(contract, IMPLEMENTED)
    require_tensor(weights, "weights", "tokens, k", *DTYPES.values())
    tokens, k = weights.shape
    require_tensor(experts, "experts", f"tokens={tokens}, k={k}", *INDEX_TYPES)
    if places is None:
        require_tensor(outputs, "outputs", f"tokens={tokens}, k={k}, hidden", *DTYPES.values())
    else:
        require_tensor(places, "places", f"tokens={tokens}, k={k}", *INDEX_TYPES)
        require_tensor(outputs, "outputs", "rows, hidden", *DTYPES.values())
    hidden = outputs.shape[-1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=outputs.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(hidden))
        launch(
            moe_combine_kernel,
            (tokens, triton.cdiv(hidden, block)),
            *(outputs, weights, experts, experts if places is None else places, out),
            contract=contract,
            HIDDEN=hidden,
            K=k,
            SLOTS=triton.next_power_of_2(k),
            BY_INDEX=contract.order.experts == "expert_index",
            FUSED=contract.primitives.accumulate == "fma",
            PLACED=places is not None,
            DTYPE=TRITON_TYPES[dtype],
            BLOCK=block,
        )
    return out
