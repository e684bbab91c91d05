"""all_gather over virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import AllGatherContract, all_gather
from tests.reference.exact import assert_same_bits
from tests.reference.operators.test_all_reduce import ranks


def test_all_gather_moves_bits() -> None:
    parts = ranks(3, 2, 5)
    parts[1][0, 0] = -0.0
    assert_same_bits(all_gather(parts, AllGatherContract()), np.concatenate(parts, axis=1))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"shards\[0\]: expected dtype float32"):
        all_gather([np.zeros(3)], AllGatherContract())  # type: ignore[list-item]
