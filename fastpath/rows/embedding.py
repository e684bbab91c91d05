# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Token embedding: `reference.operators.embedding` as Triton kernels, and its backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath._tensors import INDEX_TYPES, accepted
from fastpath.backend import DTYPES, launch, require_fields, require_tensor
from fastpath.primitives import widen
from reference.gradients import EmbeddingBackwardContract
from reference.operators.embedding import EmbeddingContract

IMPLEMENTED = (("order.merge", "copy"),)
#: Columns of one program: 16 bytes a thread in two warps.
BLOCK = 512


@triton.jit
def embedding_kernel(token_ids, table, output, vocabulary, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """output[t, block] = table[token_ids[t], block]; NaN where there is no such row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row).to(tl.int64) + tl.zeros([BLOCK], tl.int64)
    exists = (token >= 0) & (token < vocabulary)
    value = tl.load(table + token * HIDDEN + column, mask=exists & (column < HIDDEN), other=float("nan"))
    tl.store(output + row * HIDDEN + column, value, mask=column < HIDDEN)


@triton.jit
def embedding_backward_kernel(
    sorted_ids,
    order,
    grad_output,
    grad_table,
    rows,
    vocabulary,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The program of a token's first occurrence adds the gradients of all its occurrences, in ascending order."""
    start = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(sorted_ids + start).to(tl.int64)
    before = tl.load(sorted_ids + start - 1, mask=start > 0, other=-1).to(tl.int64)
    if (token != before) & (token >= 0) & (token < vocabulary):
        total = tl.load(grad_table + token * HIDDEN + column, mask=column < HIDDEN, other=0.0)
        position = start
        current = token
        while current == token:
            row = tl.load(order + position).to(tl.int64)
            total += widen(tl.load(grad_output + row * HIDDEN + column, mask=column < HIDDEN, other=0.0))
            position += 1
            current = tl.load(sorted_ids + position, mask=position < rows, other=-1).to(tl.int64)
        tl.store(grad_table + token * HIDDEN + column, total, mask=column < HIDDEN)


def embedding(token_ids: torch.Tensor, table: torch.Tensor, contract: EmbeddingContract) -> torch.Tensor:
    """Rows of ``table`` for ``token_ids``.

    A token outside the vocabulary gives a row of NaN: a device cannot raise without waiting for it.

    Args:
        token_ids: int32 or int64, [tokens].
        table: bfloat16 or float32 as the contract says, [vocabulary, hidden].

    Returns:
        [tokens, hidden], the dtype of ``table``.

    Raises:
        UnsupportedError: a contract field without kernel.
        TypeError, ValueError: dtype, shape, layout or device of an argument.
    """
    dtype = accepted(contract, IMPLEMENTED)
    require_tensor(token_ids, "token_ids", "tokens", *INDEX_TYPES)
    require_tensor(table, "table", "vocabulary, hidden", dtype)
    tokens, hidden = token_ids.shape[0], table.shape[1]
    output = torch.empty(tokens, hidden, dtype=dtype, device=table.device)
    if output.numel():
        grid = (tokens, triton.cdiv(hidden, BLOCK))
        arguments = (token_ids, table, output, table.shape[0])
        launch(
            embedding_kernel, grid, *arguments, contract=contract, options={"num_warps": 2}, HIDDEN=hidden, BLOCK=BLOCK
        )
    return output


def embedding_backward(
    grad_output: torch.Tensor,
    token_ids: torch.Tensor,
    vocabulary: int,
    contract: EmbeddingBackwardContract,
    *,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the table: per token, its occurrences' gradients added in ascending order.

    Args:
        grad_output: bfloat16 or float32, [tokens, hidden], one sequence after the other.
        token_ids: int32 or int64, [tokens].
        vocabulary: rows of the table.
        sums: float32, [vocabulary, hidden]: the gradient is added to them, in place.

    Returns:
        float32, [vocabulary, hidden], not rounded.

    Raises:
        As :func:`embedding`.
    """
    require_fields(contract, {"order.tokens": "ascending"})
    require_tensor(token_ids, "token_ids", "tokens", *INDEX_TYPES)
    require_tensor(grad_output, "grad_output", f"tokens={token_ids.shape[0]}, hidden", *DTYPES.values())
    rows, hidden = grad_output.shape
    if sums is None:
        sums = torch.zeros(vocabulary, hidden, dtype=torch.float32, device=grad_output.device)
    require_tensor(sums, "sums", f"vocabulary={vocabulary}, hidden={hidden}", torch.float32)
    if grad_output.numel():
        sorted_ids, order = torch.sort(token_ids, stable=True)
        launch(
            embedding_backward_kernel,
            (rows, triton.cdiv(hidden, BLOCK)),
            *(sorted_ids, order, grad_output, sums, rows, vocabulary),
            contract=contract,
            options={"num_warps": 2},
            HIDDEN=hidden,
            BLOCK=BLOCK,
        )
    return sums
