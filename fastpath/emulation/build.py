"""machine.c, compiled on first use by this machine's C compiler into the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from fastpath.backend import UnsupportedError

SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("machine.c", "machine.h", "vector.h", "double.h", "scalar.h", "memory.h", "matrix.h")
)
COMPILERS = ("clang-19", "gcc", "clang", "cc")
#: No contraction and no traps; fmaf must be the machine's instruction.
FLAGS = (
    *("-O2", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"),
    "-Wno-parentheses",
)


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rlk" / "emulation"


@cache
def library() -> ctypes.CDLL:
    """The machine, built once for these sources and flags; the file appears atomically.

    Raises:
        UnsupportedError: no C compiler, or it fails.
    """
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise UnsupportedError(f"no C compiler ({', '.join(COMPILERS)}); run tools/install-clang.sh")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES) + f"{compiler} {FLAGS}".encode())
    # -march=native: another processor of the same home directory builds its own
    digest.update(_processor())
    built = _folder() / f"machine-{digest.hexdigest()[:20]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        partial = built.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, str(SOURCES[0]), "-o", str(partial), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnsupportedError(f"{compiler} could not build {SOURCES[0].name}: {done.stderr[:500]}")
        partial.replace(built)
    return ctypes.CDLL(str(built))


def _processor() -> bytes:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()


@cache
def operations() -> dict[str, int]:
    """Every operation of the machine, by name."""
    machine = library()
    machine.operation_name.restype = ctypes.c_char_p
    found: dict[str, int] = {}
    while name := machine.operation_name(len(found)):
        found[name.decode()] = len(found)
    return found
