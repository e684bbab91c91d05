"""Gradient of the token embedding: per token of the vocabulary, its occurrences' gradients, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice
from reference.gradients._sums import TOKEN_ORDERS
from reference.operators._arguments import float_array, index_array
from reference.operators._numerics import quiet


@dataclass(frozen=True)
class Order(Group):
    tokens: str = choice(tuple(TOKEN_ORDERS), TOKEN_ORDERS)


@dataclass(frozen=True)
class EmbeddingBackwardContract(Contract):
    """dtable[v] = sum over t with token[t] = v of dy[t], sequence after sequence, on from earlier sums"""

    operator: ClassVar[str] = "embedding_backward"
    order: Order = Order()


@quiet()
def embedding_backward(
    grad: Float32Array,
    token_ids: NDArray[Any],
    vocabulary: int,
    contract: EmbeddingBackwardContract,
    sums: Float32Array | None = None,
) -> Float32Array:
    """Gradient of the table.

    Args:
        grad: float32, [sequences, tokens, hidden].
        token_ids: integers, [sequences, tokens].
        vocabulary: rows of the table.
        sums: float32, [vocabulary, hidden], from which the addition goes on; None is +0.

    Returns:
        float32, [vocabulary, hidden], not rounded.

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; a token outside the vocabulary.
    """
    grad = float_array(grad, "grad", "sequences, tokens, hidden")
    if token_ids.shape != grad.shape[:2]:
        raise ValueError(f"token_ids: expected shape {list(grad.shape[:2])}, got {list(token_ids.shape)}")
    total = np.zeros((vocabulary, grad.shape[2]), np.float32)
    if sums is not None:
        total = float_array(sums, "sums", f"vocabulary={vocabulary}, hidden={grad.shape[2]}").copy()
    step = slice(None) if contract.order.tokens == "ascending" else slice(None, None, -1)
    for tokens, rows in zip(token_ids, grad, strict=True):
        where = index_array(np.ascontiguousarray(tokens), "token_ids", "tokens", vocabulary, "the vocabulary")
        np.add.at(total, where[step], rows[step])  # one row after the other
    return total
