"""reduce_scatter over virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import AllReduceContract, ReduceScatterContract, all_reduce, reduce_scatter
from tests.reference.exact import assert_same_bits
from tests.reference.operators.test_all_reduce import ranks


def test_reduce_scatter_is_a_part_of_all_reduce() -> None:
    parts = ranks(4, 8, 6)
    chunks = reduce_scatter(parts, ReduceScatterContract())
    assert len(chunks) == 4
    assert_same_bits(np.concatenate(chunks), all_reduce(parts, AllReduceContract()))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="5 rows cannot be cut into 2 equal chunks"):
        reduce_scatter(ranks(2, 5, 1), ReduceScatterContract())
