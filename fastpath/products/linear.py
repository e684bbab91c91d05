"""Linear projection, whole or column parallel, and its gradient: `reference.operators.linear`, bfloat16 and float32.

A rank of a column-parallel layer calls it with its rows of the weight: outputs are independent. Gradients are matrix
products again, each under a contract of its own, so the reference states their bits too:

* of x: row parallel over the outputs (8 segments and a tree), because ranks share them;
* of the weight: one chain over tokens.
"""

from __future__ import annotations

import torch

from fastpath.backend import DTYPES, require_tensor
from fastpath.collectives.merge import merge_parts
from fastpath.products.matmul import product, require_contract, require_operands
from fastpath.products.schedules import Schedule
from reference.operators.linear import LinearContract
from reference.operators.row_linear import RowLinearContract


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    contract: LinearContract,
    bias: torch.Tensor | None = None,
    plan: Schedule | None = None,
) -> torch.Tensor:
    """The projection of every row of ``x``.

    Args:
        x: [tokens, inputs], of the contract's ``domain.input``.
        weight: [outputs, inputs], likewise.
        bias: [outputs].
        plan: a schedule to use instead of the one for this shape; the bits are the same.

    Returns:
        [tokens, outputs], of the contract's ``rounding.output``.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device; inputs not a multiple of the segments.
        UnsupportedError: a contract without a kernel, or a matrix unit that this device lacks.
    """
    require_contract(contract, bias)
    output = require_operands(x, weight, contract, bias)
    return product(x, weight, contract, contract.partition.segments, output, bias, plan)


def linear_parts(x: torch.Tensor, weight: torch.Tensor, contract: LinearContract) -> torch.Tensor:
    """:func:`linear` without bias, up to the last merge, for a kernel that merges while it reads.

    Returns:
        The output, where this shape's schedule leaves nothing to merge; else float32 [parts, tokens, outputs], whose
        balanced tree, rounded once, is the output.

    Raises:
        As :func:`linear`.
    """
    require_contract(contract, None)
    output = require_operands(x, weight, contract, None)
    return product(x, weight, contract, contract.partition.segments, output, merged=False)


def input_contract(contract: LinearContract) -> LinearContract:
    """The contract of x's gradient: row parallel for a column-parallel layer, and the other way round."""
    shared = {"domain.input": contract.domain.input, "primitives.unit": contract.primitives.unit}
    kind = LinearContract if isinstance(contract, RowLinearContract) else RowLinearContract
    return kind().replace({**shared, "rounding.output": contract.domain.input})


def weight_contract(contract: LinearContract, output: str = "float32") -> LinearContract:
    """The contract of the weight's gradient: one chain over tokens, rounded to ``output``."""
    shared = {"domain.input": contract.domain.input, "primitives.unit": contract.primitives.unit}
    return LinearContract().replace({**shared, "rounding.output": output})


def input_gradient(grad: torch.Tensor, weight: torch.Tensor, contract: LinearContract) -> torch.Tensor:
    """grad @ weight under :func:`input_contract`.

    Args:
        grad: [tokens, outputs], of the contract's ``domain.input``.
        weight: [outputs, inputs], likewise.

    Returns:
        [tokens, inputs], of the same dtype.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device; outputs not a multiple of the segments.
    """
    dtype = DTYPES[contract.domain.input]
    require_tensor(grad, "grad", "tokens, outputs", dtype)
    require_tensor(weight, "weight", f"outputs={grad.shape[1]}, inputs", dtype)
    own = input_contract(contract)
    return product(grad, weight.t(), own, own.partition.segments, dtype)


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, contract: LinearContract) -> torch.Tensor:
    """grad^T @ x under :func:`weight_contract`, rounded to the dtype of x.

    Args:
        grad: [tokens, outputs], of the contract's ``domain.input``.
        x: [tokens, inputs], likewise.

    Returns:
        [outputs, inputs], of the same dtype.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device.
    """
    dtype = DTYPES[contract.domain.input]
    require_tensor(grad, "grad", "tokens, outputs", dtype)
    require_tensor(x, "x", f"tokens={grad.shape[0]}, inputs", dtype)
    if not grad.shape[0]:  # a sum of nothing
        return torch.zeros(grad.shape[1], x.shape[1], dtype=dtype, device=x.device)
    own = weight_contract(contract, contract.domain.input)
    return product(grad.t(), x.t(), own, 1, dtype)


def narrow_to(sums: torch.Tensor, dtype: torch.dtype, contract: LinearContract) -> torch.Tensor:
    """float32 ``sums`` [rows, features] rounded to nearest even to ``dtype``."""
    out = torch.empty(sums.shape, dtype=dtype, device=sums.device)
    merge_parts(sums[None], out, None, contract)
    return out
