"""Token embedding: a copy of table rows, and what a vocabulary-parallel engine does to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array, index_array
from reference.operators._numerics import narrow


@dataclass(frozen=True)
class Order(Group):
    merge: str = choice(
        ("copy", "sum"),
        {
            "copy": "copies the row of the rank that owns the token",
            "sum": "sums the ranks' rows, zeros from all but one, so a -0 in the table becomes +0",
        },
    )


@dataclass(frozen=True)
class Rounding(Group):
    output: str = format_choice("bfloat16", "rounds the row to {value}", given=True)


@dataclass(frozen=True)
class EmbeddingContract(Contract):
    """y[t] = table[token[t]]"""

    operator: ClassVar[str] = "embedding"
    order: Order = Order()
    rounding: Rounding = Rounding()


def embedding(token_ids: NDArray[Any], table: Float32Array, contract: EmbeddingContract) -> Float32Array:
    """Rows of ``table`` for ``token_ids``.

    Args:
        token_ids: integers, [tokens].
        table: float32, [vocabulary, hidden].

    Returns:
        float32, [tokens, hidden].

    Raises:
        TypeError, ValueError: dtype, shape or byte order of an argument; a token outside the vocabulary.
    """
    table = float_array(table, "table", "vocabulary, hidden")
    tokens = index_array(token_ids, "token_ids", "tokens", table.shape[0], "the vocabulary")
    rows = table[tokens]
    if contract.order.merge == "sum":
        rows = rows + np.float32(0.0)  # -0 + 0 = +0; nothing else changes
    return narrow(rows, contract.rounding.output)
