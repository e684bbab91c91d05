"""QK-norm is RMSNorm per head."""

from __future__ import annotations

import numpy as np
import pytest

from reference.operators import QkNormContract, RmsNormContract, qk_norm, rms_norm
from tests.reference.exact import assert_same_bits, random


@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_is_rms_norm_of_every_head(head_dim: int) -> None:
    x, weight = random(head_dim, 5, 3, head_dim), random(1, head_dim)
    heads = rms_norm(x.reshape(-1, head_dim), weight, 1e-6, RmsNormContract()).output
    assert_same_bits(qk_norm(x, weight, 1e-6, QkNormContract()), heads.reshape(x.shape))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="x: expected shape"):
        qk_norm(np.zeros((2, 4), np.float32), np.ones(4, np.float32), 1e-6, QkNormContract())
    with pytest.raises(ValueError, match="head_dim"):
        qk_norm(np.zeros((2, 1, 4), np.float32), np.ones(2, np.float32), 1e-6, QkNormContract())
    with pytest.raises(ValueError, match="x/rms is never formed"):
        QkNormContract().replace({"order.product": "x*(r*w)", "rounding.normalised": "bfloat16"})
