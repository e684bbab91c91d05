"""The names that contract fields carry, and the arithmetic behind each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.dot import UNITS, dot
from reference.formats import FORMATS
from reference.primitives import PRIMITIVES, RopeParameters, RopeTable, rope_table, table_of_angles
from reference.primitives.rope_scaling import float32_frequencies
from reference.reductions import cascade, chain, lanes_tree, strided_vector, warp_shuffle
from reference.reductions.step import Step
from reference.rounding import Overflow, round_to

EXPS = tuple(PRIMITIVES["exp"])
LOGS = tuple(PRIMITIVES["log"])
RSQRTS = tuple(PRIMITIVES["rsqrt"])
SILUS = (*PRIMITIVES["silu"], "x * sigmoid(x)")

#: Ways to make the RoPE table: ``rlk`` is correctly rounded throughout; ``float32-pow`` takes 1 / theta^(2i/d) with
#: every step rounded to float32, as PyTorch code does.
TABLES = ("rlk", "float32-pow")


def lanes_or_chain(x: Float32Array, *, lanes: int, step: Step = "add") -> Float32Array:
    """One vector register of ``lanes``, merged by halving; a shorter row is a chain (PyTorch's softmax sums)."""
    if x.shape[-1] < lanes:
        return chain(x, step=step)
    return warp_shuffle(x, warp=lanes, warps=1, step=step)


_TREE = "over {} lanes (a power of two within a shorter row), each a chain, then a tree of neighbours"
_WARPS = "per thread of {} warps of {} lanes, each a chain, then by shuffles that halve a warp, then over the warps"
_HALVES = "over {} lanes, each a chain, then the upper half of the lanes onto the lower until one is left"

#: Orders of a row sum: name -> (in words, function).
_ROW_SUMS: dict[str, tuple[str, Callable[..., Float32Array]]] = {
    "lanes-tree-256": (_TREE.format(256), partial(lanes_tree, lanes=256)),
    "lanes-tree-64": (_TREE.format(64), partial(lanes_tree, lanes=64)),
    "lanes-tree-1024": (_TREE.format(1024), partial(lanes_tree, lanes=1024)),
    "chain": ("one after the other", chain),
    "warp-shuffle-32x8": (_WARPS.format(8, 32), partial(warp_shuffle, warp=32, warps=8)),
    "warp-shuffle-32x32": (_WARPS.format(32, 32), partial(warp_shuffle, warp=32, warps=32)),
    "warp-shuffle-64x4": (_WARPS.format(4, 64), partial(warp_shuffle, warp=64, warps=4)),
    "warp-shuffle-64x16": (_WARPS.format(16, 64), partial(warp_shuffle, warp=64, warps=16)),
    "cascade-8x4": ("as PyTorch's cascade of 8 lanes and 4 registers", partial(cascade, width=8, registers=4)),
    "lanes-halving-8": (_HALVES.format(8), partial(warp_shuffle, warp=8, warps=1)),
    "lanes-halving-16": (_HALVES.format(16), partial(warp_shuffle, warp=16, warps=1)),
    "lanes-16-or-chain": (
        _HALVES.format(16) + "; a shorter row one after the other",
        partial(lanes_or_chain, lanes=16),
    ),
    "vector-16x4": (
        "over 4 registers of 16 lanes, then over registers, then by halves",
        partial(strided_vector, width=16, registers=4),
    ),
}
ROW_ORDERS = tuple(_ROW_SUMS)
#: The orders in which attention may add a block of probabilities.
BLOCK_ORDERS = ("lanes-tree-256", "chain", "lanes-halving-16", "lanes-16-or-chain", "cascade-8x4", "warp-shuffle-32x8")

UNIT_NAMES = tuple(UNITS)
UNIT_WORDS = {name: f"multiplies and accumulates as {name}: {unit.arithmetic}" for name, unit in UNITS.items()}


def row_order_words(what: str) -> dict[str, str]:
    """Words for a field that names a row order: ``what`` and the order."""
    return {name: f"{what} {words}" for name, (words, _) in _ROW_SUMS.items()}


quiet = partial(np.errstate, all="ignore")


def narrow(x: Float32Array, fmt: str, overflow: str = "infinity") -> Float32Array:
    """``x`` rounded to nearest even to the format named ``fmt``."""
    if fmt == "float32":
        return x
    policy: Overflow = overflow  # type: ignore[assignment]
    return round_to(x, FORMATS[fmt], overflow=policy)


def row_sum(x: Float32Array, order: str) -> Float32Array:
    """Sum over the last axis in the named order; +0 for an empty axis."""
    if x.shape[-1] == 0:
        return np.zeros(x.shape[:-1], np.float32)
    return _ROW_SUMS[order][1](x)


def row_sum_squares(x: Float32Array, order: str, square: str, fmt: str) -> Float32Array:
    """Sum of squares over the last axis; ``square`` is "fma", or "mul_add", which rounds squares to ``fmt``."""
    if square == "mul_add":
        return row_sum(narrow(x * x, fmt), order)
    return _ROW_SUMS[order][1](x, step="square")


#: Orders in which a chain may go through the reduction axis, in words.
K_ORDERS = {
    "ascending": "goes through the reduction axis upwards",
    "pairs_odd_first": "goes upwards in pairs, the odd element of a pair first (AVX-512 BF16 on a CPU)",
    "descending": "goes through the reduction axis downwards",
    "even_odd": "takes the even elements of the reduction axis first, then the odd",
}


def k_order(size: int, order: str) -> slice | NDArray[np.int64]:
    """Index that brings ``size`` elements of the reduction axis into the named order."""
    match order:
        case "ascending":
            return slice(None)
        case "descending":
            return slice(None, None, -1)
        case "even_odd":
            return np.array([*range(0, size, 2), *range(1, size, 2)], np.int64)
        case _:
            swapped = np.arange(size, dtype=np.int64)
            pairs = swapped[: size - size % 2].reshape(-1, 2)  # a view: the last of an odd number keeps its place
            pairs[:] = pairs[:, ::-1].copy()
            return swapped


def unit_dot(
    a: Float32Array, b: Float32Array, c: Float32Array | None, unit: str, fmt: str, names: tuple[str, str]
) -> Float32Array:
    """c + a @ b on the named matrix unit, operands in ``fmt``; errors call a and b by ``names``."""
    try:
        return dot(a, b, c, unit=unit, input_format=fmt)
    except ValueError as error:
        operand, colon, what = str(error).partition(": ")
        raise ValueError(f"{dict(zip('ab', names, strict=True)).get(operand, operand)}{colon}{what}") from None


def require_unit(unit: str, fmt: str, operator: str) -> None:
    """Raise ValueError if the matrix unit has no instruction for operands in ``fmt``."""
    if fmt not in UNITS[unit].input_formats:
        allowed = ", ".join(UNITS[unit].input_formats)
        raise ValueError(
            f"{operator}: domain.input {fmt} is impossible with primitives.unit {unit}, which takes {allowed}"
        )


def unit_for(unit: str, fmt: str) -> str:
    """``unit`` if it takes operands in ``fmt``, else the portable ``fma32-seq``."""
    return unit if fmt in UNITS[unit].input_formats else "fma32-seq"


def exp(x: Float32Array, name: str) -> Float32Array:
    """The named exponential."""
    return PRIMITIVES["exp"][name](x)


def log(x: Float32Array, name: str) -> Float32Array:
    """The named natural logarithm."""
    return PRIMITIVES["log"][name](x)


def rsqrt(x: Float32Array, name: str) -> Float32Array:
    """The named reciprocal square root."""
    return PRIMITIVES["rsqrt"][name](x)


def silu(x: Float32Array, name: str) -> Float32Array:
    """The named SiLU."""
    if name == "x * sigmoid(x)":
        return x * PRIMITIVES["sigmoid"]["rlk"](x)
    return PRIMITIVES["silu"][name](x)


#: Exponentials of attention: name -> (base, function of x <= 0).
ATTENTION_EXPS: dict[str, tuple[str, Callable[[Float32Array], Float32Array]]] = {
    "exp2-nonpositive": ("2", PRIMITIVES["exp2_nonpositive"]["rlk"]),
    "exp2": ("2", PRIMITIVES["exp2"]["rlk"]),
    "exp2-correctly-rounded": ("2", PRIMITIVES["exp2"]["correctly-rounded"]),
    "exp": ("e", PRIMITIVES["exp"]["rlk"]),
    "exp-correctly-rounded": ("e", PRIMITIVES["exp"]["correctly-rounded"]),
    "exp-sleef-u10": ("e", PRIMITIVES["exp"]["sleef-u10"]),
    "exp-fast-u20": ("e", PRIMITIVES["exp"]["fast-u20"]),
}


def trigonometric_table(
    positions: NDArray[np.int64], dim: int, theta: float | RopeParameters, name: str
) -> tuple[Float32Array, Float32Array]:
    """Float32 cosines and sines, [tokens, dim / 2], by the named construction."""
    rows = 64
    while rows <= int(positions.max(initial=0)):
        rows *= 2
    table = _full_table(rows, dim, theta, name)
    return table.cos[positions], table.sin[positions]


@lru_cache(maxsize=8)
def _full_table(rows: int, dim: int, theta: float | RopeParameters, name: str) -> RopeTable:
    if name == "rlk":
        return rope_table(rows, dim, theta)
    rope = theta if isinstance(theta, RopeParameters) else RopeParameters(theta)
    position = np.arange(rows, dtype=np.float32)[:, None]
    return table_of_angles(position * float32_frequencies(dim, rope)[None, :], rope.attention_factor)
