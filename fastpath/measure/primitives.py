# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Primitives on all 2^32 inputs: one digest a block of bit patterns, against the digests of the reference.

A device cannot send 16 GB of results to a CPU that computes them again within minutes. Both sides therefore sum, modulo
2^64 and so in any order, a mixed word of each input and its result; a block whose sum differs is computed anew by the
reference, and its first wrong input named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fastpath import primitives
from fastpath.backend import INTERPRETED, compile_options, current_target
from fastpath.elf import code_of
from fastpath.primitives import bits, from_bits
from reference.checks import Float32Array
from reference.formats import FORMATS, canonical_nan
from reference.primitives import PRIMITIVES
from reference.rounding import round_to

DIGESTS = Path(__file__).with_name("primitives.json")
BLOCKS, BLOCK = 256, 1 << 24
#: Elements of one program.
LANES = 4096
#: Blocks that are computed anew when their digests differ: the first ones.
EXAMINED = 2
#: Inputs a function in the interpreter, which takes minutes for 2^20.
SAMPLE = 1 << 14


@triton.jit
def _round_bf16(x):
    return primitives.widen(primitives.round_bf16(x))


@triton.jit
def _reciprocal(x):
    return primitives.div_rn(1.0, x)


@triton.jit
def _exp2_nonpositive(x):
    return primitives.exp2_nonpositive(tl.where(x > 0, primitives.negative(x), x))


def _reference(name: str) -> Callable[[Float32Array], Float32Array]:
    return PRIMITIVES[name]["rlk"]


def _square_root(x: Float32Array) -> Float32Array:
    with np.errstate(all="ignore"):
        return np.sqrt(x)


def _one_over(x: Float32Array) -> Float32Array:
    with np.errstate(all="ignore"):
        return np.float32(1) / x


#: Function -> on the device, in the reference. ``exp2_nonpositive`` takes -|x| for a positive x.
#: Function -> on the device, in the reference. ``exp2_nonpositive`` takes -|x| for a positive x.
FUNCTIONS: dict[str, tuple[Any, Callable[[Float32Array], Float32Array]]] = {
    **{
        name: (getattr(primitives, name), _reference(name))
        for name in ("exp", "exp2", "log", "rsqrt", "sigmoid", "silu")
    },
    "exp2_nonpositive": (_exp2_nonpositive, lambda x: _reference("exp2_nonpositive")(np.where(x > 0, -x, x))),
    "sqrt_rn": (primitives.sqrt_rn, _square_root),
    "reciprocal": (_reciprocal, _one_over),
    "round_bf16": (_round_bf16, lambda x: round_to(x, FORMATS["bfloat16"])),
}


@triton.jit
def mix(word):
    """SplitMix64's finaliser of a uint64: every bit of the word moves every bit of the sum."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def digest_kernel(out, FUNCTION: tl.constexpr, LANES: tl.constexpr):
    """Add the mixed words of LANES inputs to out[block], int64; the program's number says which inputs."""
    first = tl.program_id(0).to(tl.uint64) * LANES
    index = first + tl.arange(0, LANES).to(tl.uint64)
    result = FUNCTION(from_bits(index.to(tl.uint32).to(tl.int32, bitcast=True)))
    canonical = tl.where(result == result, bits(result), 0x7FC00000).to(tl.uint32, bitcast=True)
    word = mix((index << 32) | canonical.to(tl.uint64))
    tl.atomic_add(out + (first >> 24).to(tl.int64), tl.sum(word.to(tl.int64, bitcast=True)))


@triton.jit
def apply_kernel(x, out, FUNCTION: tl.constexpr, LANES: tl.constexpr):
    """out = FUNCTION(x)."""
    offset = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(out + offset, FUNCTION(tl.load(x + offset)))


def digest(index: np.ndarray[Any, Any], result: Float32Array) -> int:
    """What `digest_kernel` adds for these inputs (uint64) and results: an integer below 2^64."""
    word = (index.astype(np.uint64) << np.uint64(32)) | canonical_nan(result).view(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int((word ^ (word >> np.uint64(31))).sum(dtype=np.uint64))


@cache
def expected() -> dict[str, list[int]]:
    """Function -> the reference's digest of each block of 2^24 bit patterns."""
    stored = json.loads(DIGESTS.read_text())["digests"]
    return {name: [int(word, 16) for word in words] for name, words in stored.items()}


def measure_primitive(name: str) -> dict[str, Any]:
    """One function on every input; in the interpreter, on a sample."""
    function, reference = FUNCTIONS[name]
    if INTERPRETED:
        rng = np.random.default_rng(0)
        x = rng.integers(0, 1 << 32, SAMPLE, dtype=np.uint64).astype(np.uint32).view(np.float32)
        got = _apply(function, x)
        return {"function": name, "inputs": x.size, **_differences(x, got, reference(x))}
    sums = torch.zeros(BLOCKS, dtype=torch.int64, device="cuda")
    compiled = digest_kernel[((BLOCKS * BLOCK) // LANES,)](sums, FUNCTION=function, LANES=LANES, **_options())
    found = [int(value) & (1 << 64) - 1 for value in sums.cpu().tolist()]
    wrong = [block for block, (a, b) in enumerate(zip(found, expected()[name], strict=True)) if a != b]
    report: dict[str, Any] = {"function": name, "inputs": BLOCKS * BLOCK, "different": 0, "first": None}
    for block in wrong[:EXAMINED]:
        x = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64).astype(np.uint32).view(np.float32)
        own = _differences(x, _apply(function, x), reference(x))
        report["different"] += own["different"]
        report["first"] = report["first"] or own["first"]
    report["wrong_blocks"] = wrong
    report["digest"] = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    code = compiled.asm.get("cubin") or compiled.asm.get("hsaco") or b""
    report["code_sha256"] = hashlib.sha256(code_of(code)).hexdigest()
    return report


def _options() -> dict[str, Any]:
    return compile_options(current_target(), num_warps=4)


def _apply(function: Any, x: Float32Array) -> Float32Array:
    values = torch.from_numpy(x)
    on = values if INTERPRETED else values.cuda()
    out = torch.empty_like(on)
    apply_kernel[(x.size // LANES,)](on, out, FUNCTION=function, LANES=LANES, **_options())
    result: Float32Array = out.cpu().numpy()
    return result


def _differences(x: Float32Array, got: Float32Array, want: Float32Array) -> dict[str, Any]:
    a, b = (canonical_nan(np.asarray(part, np.float32)).view(np.uint32) for part in (got, want))
    where = np.flatnonzero((a != b) & ~(np.isnan(got) & np.isnan(want)))
    first = None
    if where.size:
        i = where[0]
        first = {
            "x": f"{int(x.view(np.uint32)[i]):#010x}", "device": f"{int(a[i]):#010x}", "reference": f"{int(b[i]):#010x}"
        }  # fmt: skip
    return {"different": int(where.size), "first": first}
