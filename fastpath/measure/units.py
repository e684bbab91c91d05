# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Unit probes: products whose every bit the matrix unit decides, and which models give those bits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fastpath.measure.models import Model, aligned_family, known
from fastpath.measure.operands import KINDS, Operands, operands
from reference.checks import Float32Array
from reference.formats import FORMATS, Format, canonical_nan, encode

SIZE = 64
#: (products, steps): many single instructions with every kind of C, and chains of them.
SHAPES = ((16, 1), (1, 32))
#: torch's type of each probed format.
STORAGE = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "tfloat32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}
#: arch -> format -> the model that `reference.dot` states for it.
EXPECTED: dict[str, dict[str, str]] = {
    "sm_80": {"float32": "fma32-seq"} | dict.fromkeys(("bfloat16", "float16", "tfloat32"), "ampere-k8"),
    "sm_90": {"float32": "fma32-seq"}
    | dict.fromkeys(("bfloat16", "float16", "tfloat32", "float8_e4m3fn", "float8_e5m2"), "hopper-k16"),
    "gfx90a": {"float32": "mfma-cdna2", "bfloat16": "mfma-cdna2", "float16": "mfma-cdna2"},
    "gfx942": {"float32": "fma32-seq"}
    | dict.fromkeys(("bfloat16", "float16", "tfloat32", "float8_e4m3fnuz"), "mfma-cdna3-g8"),
}
#: arch -> formats; for any other arch, those of every GPU.
FORMATS_OF = {arch: tuple(models) for arch, models in EXPECTED.items()}
FORMATS_OF["gfx950"] = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
ANY = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Route:
    """One way to reach the unit: compile options that make Triton choose another instruction."""

    name: str
    options: dict[str, Any]


ROUTES = {
    "cuda": (Route("4 warps", {"num_warps": 4}), Route("1 warp", {"num_warps": 1})),
    "hip": tuple(
        Route(f"{n}x{n}", {"num_warps": 4, "kpack": 1, "matrix_instr_nonkdim": n, "allow_flush_denorm": False})
        for n in (16, 32)
    ),
}


@triton.jit
def steps_kernel(
    a, b, c, out,
    SIZE: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one product: out = c + a @ b, STEPS matrix products of K."""
    which = tl.program_id(0)
    rows, columns, ks = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, K)
    square = which * SIZE * SIZE + rows[:, None] * SIZE + columns[None, :]
    total = tl.load(c + square)
    for step in range(STEPS):
        k = step * K + ks
        left = tl.load(a + which * SIZE * STEPS * K + rows[:, None] * (STEPS * K) + k[None, :])
        right = tl.load(b + which * SIZE * STEPS * K + k[:, None] * SIZE + columns[None, :])
        total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(out + square, total)


def inner(fmt: Format) -> int:
    """K of one step: the least that Triton takes."""
    return 32 if fmt.bits == 8 else 16


def on_device(x: Float32Array, fmt: Format) -> torch.Tensor:
    """``x`` in the storage of ``fmt``, through its bit patterns."""
    codes = x if fmt.name in ("float32", "tfloat32") else encode(x, fmt)
    signed = np.ascontiguousarray(codes).view({1: np.int8, 2: np.int16, 4: np.int32}[codes.itemsize])
    return torch.from_numpy(signed).cuda().view(STORAGE[fmt.name])


def launch(given: Operands, fmt: Format, route: Route) -> tuple[Float32Array, dict[str, str]]:
    """What the device computes, NaN canonical, and the compiled code's texts."""
    products, size, length = given.a.shape
    step = inner(fmt)
    parts = [on_device(given.a, fmt), on_device(given.b, fmt), on_device(given.c, FORMATS["float32"])]
    out = torch.empty(given.c.shape, dtype=torch.float32, device="cuda")
    precision = "tf32" if fmt.name == "tfloat32" else "ieee"
    rows = 16 if route.options["num_warps"] == 1 else size
    compiled = steps_kernel[(products, size // rows)](
        *parts,
        out,
        SIZE=size,
        ROWS=rows,
        K=step,
        STEPS=length // step,
        PRECISION=precision,
        enable_fp_fusion=False,
        **route.options,
    )
    return canonical_nan(out.cpu().numpy()), dict(compiled.asm)


def instructions(texts: dict[str, str]) -> list[str]:
    """Matrix instructions of the compiled code, as its assembly names them."""
    text = texts.get("amdgcn") or texts.get("ptx") or ""
    found = re.findall(r"\b(v_mfma\w+|wgmma\.mma_async[\w.]+|mma\.sync[\w.]+|fma\.rn\.f32)", text)
    return sorted(set(found))


@dataclass
class Tally:
    """How one model does against the device."""

    model: Model
    compared: int = 0
    different: int = 0
    first: dict[str, Any] | None = None

    def add(self, kind: str, given: Operands, got: Float32Array, fmt: Format) -> None:
        """Hold one probe's outputs against the model."""
        for index in range(len(given.a)):
            a, b, c = given.a[index], given.b[index], given.c[index]
            expected = canonical_nan(np.asarray(self.model.accumulate(a, b, c, fmt), np.float32))
            bad = got[index].view(np.uint32) != expected.view(np.uint32)
            self.compared += bad.size
            count = int(bad.sum())
            self.different += count
            if count and (self.first is None or a.shape[1] < len(self.first["a"])):
                i, j = (int(n) for n in np.argwhere(bad)[0])
                self.first = {
                    "kind": kind,
                    "a": _hexadecimal(a[i], fmt),
                    "b": _hexadecimal(b[:, j], fmt),
                    "c": _hexadecimal(c[i, j : j + 1], FORMATS["float32"])[0],
                    "device": _hexadecimal(got[index][i, j : j + 1], FORMATS["float32"])[0],
                    "model": _hexadecimal(expected[i, j : j + 1], FORMATS["float32"])[0],
                }

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "model": self.model.name,
            "compared": self.compared,
            "different": self.different,
            "reproduces": self.compared > 0 and not self.different,
            "first": self.first,
        }


def _hexadecimal(x: Float32Array, fmt: Format) -> list[str]:
    codes = x.view(np.uint32) if fmt.bits >= 19 else encode(np.ascontiguousarray(x), fmt)
    digits = 8 if fmt.bits >= 19 else fmt.bits // 4
    return [f"0x{int(code):0{digits}x}" for code in codes]


def probes(fmt: Format) -> Iterator[tuple[str, Operands]]:
    """Every probe of a format: its name and its operands."""
    for products, steps in SHAPES:
        for kind in KINDS:
            length = steps * inner(fmt)
            yield f"{kind}/{products}x{SIZE}x{SIZE}x{length}", operands(kind, fmt, products, SIZE, length)


def expected_model(arch: str, format_name: str, route: Route) -> str | None:
    """The model that the reference states for this architecture's unit; None where it states none."""
    model = EXPECTED.get(arch, {}).get(format_name)
    # one warp has no wgmma, and Triton then widens 8-bit operands
    return f"{model} as float16" if model and FORMATS[format_name].bits == 8 and route.name == "1 warp" else model


def measure_unit(arch: str, format_name: str, route: Route) -> dict[str, Any]:
    """Run every probe of a format through one route, and hold the bits against every model."""
    fmt, stated = FORMATS[format_name], expected_model(arch, format_name, route)
    tallies = [Tally(model) for model in known(fmt)]
    outputs: dict[str, str] = {}
    texts: dict[str, str] = {}
    accumulations = 0
    everything = list(probes(fmt))
    results = []
    for name, given in everything:
        got, texts = launch(given, fmt, route)
        results.append(got)
        outputs[name] = hashlib.sha256(got.tobytes()).hexdigest()
        accumulations += given.c.size * given.a.shape[2]
    for (name, given), got in zip(everything, results, strict=True):
        for tally in tallies:
            # a model that a thousand outputs have refuted need not be computed to the end
            if tally.different < 1000 or tally.model.name == stated:
                tally.add(name, given, got, fmt)
    found = [tally.model.name for tally in tallies if not tally.different]
    searched = [] if found else _search(everything, results, fmt)
    return {
        "format": format_name,
        "route": route.name,
        "instructions": instructions(texts),
        "accumulations": accumulations,
        "expected": stated,
        "reproduced_by": found,
        "searched": searched,
        "models": [tally.as_dict() for tally in tallies],
        "inputs": _inputs_digest(everything),
        "outputs": outputs,
    }


def _search(everything: list[tuple[str, Operands]], results: list[Float32Array], fmt: Format) -> list[str]:
    """Members of the aligned family that give the bits of every probe."""
    found = []
    for model in aligned_family(fmt):
        tally = Tally(model)
        for (name, given), got in zip(everything, results, strict=True):
            tally.add(name, given, got, fmt)
            if tally.different:
                break
        if not tally.different:
            found.append(model.name)
    return found


def _inputs_digest(everything: list[tuple[str, Operands]]) -> str:
    digest = hashlib.sha256()
    for name, given in everything:
        digest.update(name.encode())
        for part in (given.a, given.b, given.c):
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def reachable(arch: str) -> tuple[str, ...]:
    """Formats to probe on an architecture."""
    return FORMATS_OF.get(arch, ANY)


__all__ = ["ROUTES", "Route", "expected_model", "measure_unit", "probes", "reachable", "steps_kernel"]
