"""Embedding: a copy, whose only arithmetic is the sign of zero."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import EmbeddingContract, embedding
from tests.reference.exact import assert_same_bits, bits, random

TOKENS = np.array([3, 0, 3], np.int64)


def test_copies_rows() -> None:
    table = random(1, 5, 8)
    table[3, 0] = -0.0
    assert_same_bits(embedding(TOKENS, table, EmbeddingContract()), table[TOKENS])


def test_a_sum_over_ranks_turns_negative_zero() -> None:
    table = np.full((4, 2), -0.0, np.float32)
    summed = embedding(TOKENS, table, EmbeddingContract().override("order.merge", "sum"))
    assert (bits(summed) == 0).all()


def test_rounds_a_wider_table() -> None:
    table = np.full((4, 1), 1 + 2.0**-9 + 2.0**-20, np.float32)
    assert embedding(TOKENS, table, EmbeddingContract())[0, 0] == 1.0
    assert embedding(TOKENS, table, EmbeddingContract().with_dtype("float32"))[0, 0] == table[0, 0]


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (np.array([1, 4]), ValueError, r"token_ids\[1\] = 4 is outside the vocabulary \(0 to 3\)"),
        (np.array([-1]), ValueError, r"token_ids\[0\] = -1 is outside"),
        (np.array([[1]]), ValueError, "token_ids: expected shape"),
        (np.array([1.0]), TypeError, "integers"),
        (np.array([1], ">i8"), TypeError, "native"),
        ([1], TypeError, "got list"),
    ],
)
def test_bad_input(tokens: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        embedding(tokens, np.zeros((4, 2), np.float32), EmbeddingContract())  # type: ignore[arg-type]
