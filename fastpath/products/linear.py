"""Linear projection, whole or column parallel, and its gradient: `reference.operators.linear`, bfloat16 and float32.

A rank of a column-parallel layer calls it with its rows of the weight: outputs are independent. Gradients are matrix
products again, under `reference.gradients.linear`.
"""

from __future__ import annotations

import torch

from fastpath.backend import DTYPES, require_fields, require_tensor
from fastpath.collectives.merge import merge_parts
from fastpath.products.matmul import product, require_contract, require_operands
from fastpath.products.schedules import Schedule
from fastpath.rows.rms_norm import row_gradient
from reference.contract.base import Contract
from reference.gradients import LinearBackwardContract, rank_segments
from reference.operators.linear import LinearContract

#: Tokens of which every matrix unit's step is a divisor.
STEP = 16


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


def input_gradient(
    grad: torch.Tensor, weight: torch.Tensor, contract: LinearBackwardContract, *, joined: int = 1
) -> torch.Tensor:
    """grad @ weight on one rank: `reference.gradients.linear`.

    Args:
        grad: [tokens, outputs], of the contract's ``domain.input``.
        weight: [outputs, inputs], likewise.
        joined: how many projections the weight holds one below the other.

    Returns:
        [tokens, inputs], of the contract's ``rounding.input``.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device; outputs that ``joined`` does not divide.
        UnsupportedError: a contract without a kernel.
    """
    return _input_product(grad, weight, contract, 1, joined, DTYPES[contract.rounding.input])


def input_gradient_partial(
    grad: torch.Tensor, weight: torch.Tensor, contract: LinearBackwardContract, ranks: int, *, joined: int = 1
) -> torch.Tensor:
    """One rank's share of :func:`input_gradient`, float32, not rounded: [tokens, inputs].

    Raises:
        As :func:`input_gradient`; segments that the ranks cannot share evenly.
    """
    return _input_product(grad, weight, contract, ranks, joined, torch.float32)


def input_gradient_merge(partials: torch.Tensor, contract: LinearBackwardContract) -> torch.Tensor:
    """All ranks' shares, float32 [ranks, tokens, inputs], rank 0 first, merged and rounded: [tokens, inputs]."""
    require_tensor(partials, "partials", "ranks, tokens, inputs", torch.float32)
    _require_gradient(contract)
    out = torch.empty(partials.shape[1:], dtype=DTYPES[contract.rounding.input], device=partials.device)
    if out.numel():
        merge_parts(partials, out, None, contract)
    return out


def _input_product(
    grad: torch.Tensor,
    weight: torch.Tensor,
    contract: LinearBackwardContract,
    ranks: int,
    joined: int,
    output: torch.dtype,
) -> torch.Tensor:
    _require_gradient(contract)
    dtype = DTYPES[contract.domain.input]
    require_tensor(grad, "grad", "tokens, outputs", dtype)
    require_tensor(weight, "weight", f"outputs={grad.shape[1]}, inputs", dtype)
    segments = rank_segments(grad.shape[1], contract.partition.segments, ranks, joined)
    return product(grad, weight.t(), contract, segments, output, joined=joined)


def weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, contract: LinearBackwardContract, sums: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of the weight, one chain over tokens: `reference.gradients.linear`.

    Args:
        grad: [sequences, tokens, outputs], of the contract's ``domain.input``, any strides.
        x: [sequences, tokens, inputs], likewise.
        sums: float32, [outputs, inputs]: the chain goes on from them, and leaves its sums there.

    Returns:
        float32, [outputs, inputs], not rounded: ``sums`` if given.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device.
        UnsupportedError: a contract without a kernel.
    """
    _require_gradient(contract)
    dtype = DTYPES[contract.domain.input]
    if grad.ndim != 3 or x.ndim != 3 or grad.shape[:2] != x.shape[:2] or grad.dtype != dtype or x.dtype != dtype:
        raise ValueError(
            f"grad, x: expected {dtype} [sequences, tokens, features], got {grad.dtype} {list(grad.shape)} and "
            f"{x.dtype} {list(x.shape)}"
        )
    shape = grad.shape[2], x.shape[2]
    if sums is not None:
        require_tensor(sums, "sums", f"outputs={shape[0]}, inputs={shape[1]}", torch.float32)
    if not grad.shape[0] * grad.shape[1]:
        return torch.zeros(shape, dtype=torch.float32, device=x.device) if sums is None else sums
    rows, others = _one_chain(grad, -0.0), _one_chain(x, 0.0)
    return product(rows.t(), others.t(), contract, 1, torch.float32, sums=sums)


def _one_chain(x: torch.Tensor, missing: float) -> torch.Tensor:
    """[sequences, tokens, features] as rows, each sequence padded to whole steps of every matrix unit.

    -0 times +0 added to a sum leaves it alone; so do whole steps of zeros of a matrix unit.
    """
    sequences, tokens, features = x.shape
    if sequences == 1:
        return x[0]
    padded = -(-tokens // STEP) * STEP
    if padded == tokens:
        return x.reshape(-1, features)
    rows = torch.full((sequences, padded, features), missing, dtype=x.dtype, device=x.device)
    rows[:, :tokens] = x
    return rows.view(-1, features)


def bias_gradient(
    grad: torch.Tensor, contract: LinearBackwardContract, *, sequences: int = 1, sums: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of the bias, float32 [outputs]: `reference.gradients.bias_gradient`.

    Args:
        grad: [tokens * sequences, outputs], contiguous, the tokens of several sequences side by side.
        sums: float32, [outputs]: the gradient is added to them, in place.

    Raises:
        TypeError, ValueError: dtype, shape, layout or device.
    """
    require_tensor(grad, "grad", "tokens, outputs", *DTYPES.values())
    return row_gradient(grad[:, None], None, None, contract, sequences, sums)[0]


def _require_gradient(contract: LinearBackwardContract) -> None:
    """Refuse what the kernels do not compute.

    Raises:
        UnsupportedError: naming the field.
    """
    implemented = {"domain.input": tuple(DTYPES), "rounding.input": tuple(DTYPES), "order.merge": "tree"}
    require_fields(contract, {**implemented, "order.tokens": "ascending"})


def narrow_to(sums: torch.Tensor, dtype: torch.dtype, contract: Contract) -> torch.Tensor:
    """float32 ``sums`` [rows, features] rounded to nearest even to ``dtype``."""
    out = torch.empty(sums.shape, dtype=dtype, device=sums.device)
    merge_parts(sums[None], out, None, contract)
    return out
