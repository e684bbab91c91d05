from __future__ import annotations

import pytest

from diffcheck.base.processor import MODELLED, processor_class

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("sse2 avx2 avx512f avx512_bf16 amx_tile amx_bf16", "AMX"),
        ("sse2 avx2 avx512f avx512_bf16", MODELLED),
        ("sse2 avx2 avx512f", "AVX-512"),
        ("sse2 avx2", "AVX2"),
    ],
)
def test_the_widest_matrix_instructions_name_the_class(flags: str, expected: str) -> None:
    assert processor_class(frozenset(flags.split())) == expected


def test_this_processor_is_what_pytorch_takes_it_for() -> None:
    if torch.cpu._is_amx_tile_supported():
        assert processor_class() == "AMX"
    else:
        assert (processor_class() == MODELLED) == torch.cpu._is_avx512_bf16_supported()
