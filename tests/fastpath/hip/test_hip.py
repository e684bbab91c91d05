"""The HIP C++ sources: compiled for gfx942 and checked in their assembly; the all-reduce also built by nvcc."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from fastpath.backend import UnsupportedError
from fastpath.hip import build

needs_clang = pytest.mark.skipif(
    shutil.which(build.CLANG) is None or shutil.which("ld.lld-19") is None,
    reason="clang-19 and lld-19 are not installed: run tools/install-clang.sh",
)


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hip")
    names = ("mfma_gemm.hip", "all_reduce.hip")
    return {name: build.compile_gfx942(name, folder / f"{name}.s", assembly=True).read_text() for name in names}


@needs_clang
@pytest.mark.parametrize("source", ["mfma_gemm.hip", "all_reduce.hip"])
def test_code_object(source: str, tmp_path: Path) -> None:
    assert build.compile_gfx942(source, tmp_path / "k.co").read_bytes()[:4] == b"\x7fELF"


@needs_clang
def test_sums_are_made_by_the_instruction_of_the_contract(assembly: dict[str, str]) -> None:
    text = assembly["mfma_gemm.hip"]
    assert set(re.findall(r"v_mfma\w+", text)) == {"v_mfma_f32_16x16x16_bf16"}
    # a tile of 2 x 2 instructions, two steps of 16: chains of 1, 2, 4 and 8 segments, unrolled
    assert len(re.findall("v_mfma", text)) == 8 * (1 + 2 + 4 + 8)


@needs_clang
@pytest.mark.parametrize("source", ["mfma_gemm.hip", "all_reduce.hip"])
def test_nothing_is_contracted_flushed_or_spilled(source: str, assembly: dict[str, str]) -> None:
    text = assembly[source]
    assert not re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad|mac|dot)\w*_f32", text)
    assert set(re.findall(r"\.amdhsa_float_denorm_mode_32 (\d)", text)) == {"3"}, "subnormals must be kept"
    assert set(re.findall(r"\.amdhsa_float_round_mode_32 (\d)", text)) == {"0"}, "to nearest even"
    assert set(re.findall(r"\.private_segment_fixed_size: (\d+)", text)) == {"0"}, "no scratch"


@needs_clang
def test_tree_adds_every_rank_but_the_first(assembly: dict[str, str]) -> None:
    kernels = re.split(r"^tree_all_reduce_(\d):", assembly["all_reduce.hip"], flags=re.MULTILINE)[1:]
    for ranks, body in zip(kernels[::2], kernels[1::2], strict=True):
        code = body.split(".end_amdhsa_kernel")[0]
        adds = len(re.findall(r"\bv_add_f32", code)) + 2 * len(re.findall(r"\bv_pk_add_f32", code))
        assert adds == 4 * (int(ranks) - 1)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: install CUDA 12 or newer")
def test_all_reduce_builds_for_nvidia(tmp_path: Path) -> None:
    assert build.compile_cuda("all_reduce.hip", tmp_path / "all_reduce.so").read_bytes()[:4] == b"\x7fELF"


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="clang-19 is not installed"):
        build.compile_gfx942("mfma_gemm.hip", tmp_path / "k.co")
    with pytest.raises(UnsupportedError, match="nvcc is not installed"):
        build.compile_cuda("all_reduce.hip", tmp_path / "k.so")


@needs_clang
def test_messages_of_the_compiler_are_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.hip").write_text("this is no program")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError, match=r"clang-19 failed on .*broken\.hip"):
        build.compile_gfx942("broken.hip", tmp_path / "k.co")
