"""The C oracle, compiled on first use with the machine's gcc and called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.formats import Format
from reference.rounding import MODES, OVERFLOWS, Mode, Overflow

SOURCE = Path(__file__).with_name("oracle.c")
BUILD = Path(__file__).parents[3] / "build" / "oracle"
#: fmaf must be the machine's instruction: x86-64 has it as an extension, 64-bit Arm always.
_FMA = ("-mfma",) if platform.machine() == "x86_64" else ()
FLAGS = ("-O2", *_FMA, "-ffp-contract=off", "-shared", "-fPIC")
NANS = ("ieee", "all-ones", "negative-zero")

Float32Array = NDArray[np.float32]


def compiler() -> str | None:
    """The C compiler, or None where there is none; tests that need it are skipped then."""
    return shutil.which("gcc")


@cache
def library() -> ctypes.CDLL:
    """The compiled oracle; its file name carries the digest of the source, and it appears atomically."""
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    target = BUILD / f"oracle-{digest}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{os.getpid()}")
        subprocess.run([str(compiler()), *FLAGS, str(SOURCE), "-o", str(temporary), "-lm"], check=True)
        temporary.replace(target)
    return ctypes.CDLL(str(target))


class _Rounding(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32) for name in ("exponent_bits", "mantissa_bits", "bias", "nan", "mode", "overflow")
    ]


class _Accuracy(ctypes.Structure):
    _fields_ = [
        ("worst", ctypes.c_double),
        ("worst_x", ctypes.c_float),
        ("misrounded", ctypes.c_int64),
        ("measured", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class Accuracy:
    """Errors of a primitive over a set of inputs."""

    #: Largest error in units in the last place of the exact value, and the input it occurs at.
    worst: float
    worst_x: float
    #: Inputs whose result is not the exact value rounded to nearest even, of how many.
    misrounded: int
    measured: int


def round_codes(
    x: Float32Array, fmt: Format, mode: Mode, overflow: Overflow, random_bits: NDArray[np.uint32] | None
) -> NDArray[Any]:
    """Bit patterns of `x` rounded to `fmt`, as `reference.formats.encode` writes them."""
    setting = _Rounding(
        fmt.exponent_bits,
        fmt.mantissa_bits,
        fmt.bias,
        NANS.index(fmt.nan),
        MODES.index(mode),
        OVERFLOWS.index(overflow),
    )
    codes = np.empty(x.shape, np.uint32)
    random = None if random_bits is None else _pointer(random_bits)
    library().round_array(_pointer(x), random, _pointer(codes), ctypes.c_int64(x.size), ctypes.byref(setting))
    return codes.astype(fmt.storage)


def fma(a: Float32Array, b: Float32Array, c: Float32Array) -> Float32Array:
    """The machine's fmaf."""
    result = np.empty(a.shape, np.float32)
    library().fma_array(*(_pointer(array) for array in (a, b, c, result)), ctypes.c_int64(a.size))
    return result


def primitive(name: str, x: Float32Array) -> Float32Array:
    """A primitive's sequence of operations in C; `name` is "function/variant"."""
    result = np.empty(x.shape, np.float32)
    if library().primitive_array(name.encode(), _pointer(x), _pointer(result), ctypes.c_int64(x.size)):
        raise ValueError(f"name: the C oracle has no primitive {name!r}")
    return result


def measure(name: str, x: Float32Array, y: Float32Array, domain: tuple[float, float]) -> Accuracy:
    """Errors of `y` = primitive(`x`) for `x` inside `domain`, against the C library in double precision."""
    result = _Accuracy(-1.0, float("nan"), 0, 0)
    bounds = [ctypes.c_float(bound) for bound in domain]
    code = library().measure(
        name.encode(), _pointer(x), _pointer(y), ctypes.c_int64(x.size), *bounds, ctypes.byref(result)
    )
    if code:
        raise ValueError(f"name: the C oracle has no primitive {name!r}")
    return Accuracy(result.worst, result.worst_x, result.misrounded, result.measured)


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    if not array.flags.c_contiguous:
        raise ValueError("array: expected C order")
    return ctypes.c_void_p(array.ctypes.data)
