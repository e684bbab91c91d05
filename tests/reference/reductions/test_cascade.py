"""The cascade sum is the order of PyTorch's CPU sum; PyTorch itself is the oracle where it is installed."""

import numpy as np
import pytest

from reference.reductions import cascade

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("n", [1, 5, 8, 31, 64, 100, 500, 576, 1000, 1024, 4096, 4100, 40_000])
def test_equals_torch_sum(n: int) -> None:
    x = np.random.default_rng(n).standard_normal((8, n)).astype(np.float32)
    ours, theirs = cascade(x), torch.from_numpy(x).sum(-1).numpy()
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
