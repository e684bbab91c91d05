# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The residual add: `reference.operators.residual_add` as a Triton kernel. Its gradient is the identity, twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath._tensors import TRITON_TYPES, model_dtype
from fastpath.backend import launch, require_tensor
from fastpath.primitives import narrow, widen
from reference.operators.residual_add import ResidualAddContract

#: Elements of one program: 16 bytes a thread in four warps.
BLOCK = 1024


@triton.jit
def residual_add_kernel(x, residual, output, elements, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """output = x + residual, rounded once."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    total = widen(tl.load(x + index, mask=inside)) + widen(tl.load(residual + index, mask=inside))
    tl.store(output + index, narrow(total, DTYPE), mask=inside)


def residual_add(x: torch.Tensor, residual: torch.Tensor, contract: ResidualAddContract) -> torch.Tensor:
    """The float32 sum of ``x`` and ``residual``, rounded once.

    Args:
        x, residual: bfloat16 or float32 as the contract says, [tokens, hidden].

    Returns:
        [tokens, hidden], the same dtype.

    Raises:
        UnsupportedError: a format without kernel.
        TypeError, ValueError: dtype, shape, layout or device of an argument.
    """
    dtype = model_dtype(contract)
    require_tensor(x, "x", "tokens, hidden", dtype)
    require_tensor(residual, "residual", f"tokens={x.shape[0]}, hidden={x.shape[1]}", dtype)
    output = torch.empty_like(x)
    if x.numel():
        launch(
            residual_add_kernel,
            (triton.cdiv(x.numel(), BLOCK),),
            *(x, residual, output, x.numel()),
            contract=contract,
            BLOCK=BLOCK,
            DTYPE=TRITON_TYPES[dtype],
        )
    return output
