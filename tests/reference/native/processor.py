"""Which processor the native profiles model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

modelled_processor = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
    reason="models the matrix products of AVX-512 BF16; without it, or with AMX, the libraries sum in another order",
)
