"""Compile the HIP C++ sources: for gfx942 with clang and no ROCm, for NVIDIA with nvcc.

Debian's clang-19 and lld-19 are enough for gfx942 (`tools/install-clang.sh`). No MI300X has run the result: it is
compiled for gfx942 and checked.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from fastpath.backend import UnsupportedError

SOURCES = Path(__file__).parent
CLANG = "clang-19"
#: No contraction: a multiplication and an addition stay two roundings. Subnormals are kept by default on gfx942.
GFX942_FLAGS = (
    *("-x", "hip", "--offload-arch=gfx942", "--offload-device-only", "-nogpulib", "-nogpuinc"),
    *("-O3", "-std=c++17", "-ffp-contract=off", "--no-gpu-bundle-output", "-Wall", "-Werror"),
)
NVCC_FLAGS = ("-x", "cu", "-O3", "-std=c++17", "-fmad=false", "-shared", "-Xcompiler", "-fPIC")


def compile_gfx942(source: str, output: Path, assembly: bool = False) -> Path:
    """Compile ``source`` (a file name of this folder) for gfx942 into a code object, or into assembly text.

    Raises:
        UnsupportedError: clang-19 or lld-19 is not installed.
        RuntimeError: the compiler's messages.
    """
    for tool in (CLANG, "ld.lld-19"):
        if shutil.which(tool) is None:
            raise UnsupportedError(f"{tool} is not installed; run tools/install-clang.sh")
    return _run([CLANG, *GFX942_FLAGS, *(["-S"] if assembly else []), "-o", str(output), str(SOURCES / source)], output)


def compile_cuda(source: str, output: Path, arch: str = "sm_90") -> Path:
    """Compile ``source`` for NVIDIA into a shared library with its host functions.

    Raises:
        UnsupportedError: nvcc is not installed.
        RuntimeError: the compiler's messages.
    """
    if shutil.which("nvcc") is None:
        raise UnsupportedError("nvcc is not installed; install CUDA 12 or newer")
    return _run(["nvcc", *NVCC_FLAGS, f"-arch={arch}", "-o", str(output), str(SOURCES / source)], output)


def _run(command: list[str], output: Path) -> Path:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed on {command[-1]}:\n{done.stderr}")
    return output
