"""A tree of additions in the arithmetic of a candidate, to be held against a kernel's own bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diffcheck.infer.active.kernel import PRECISION, Float64Array
from diffcheck.infer.active.tree import Tree, fold
from reference.arithmetic import fma
from reference.formats import FORMATS
from reference.rounding import round_to


@dataclass(frozen=True)
class Arithmetic:
    """How the nodes of a tree compute."""

    #: Format of every sum: float32, float64, bfloat16 or float16.
    sums: str
    #: Of a product that meets a sum: ``fused`` into it, ``rounded`` to the sums' format first, ``exact`` in it anyway;
    #: ``none``: summands are no products.
    products: str

    def __str__(self) -> str:
        words = {"fused": ", fused multiply-add", "rounded": ", products rounded first", "exact": ", exact products"}
        return f"sums in {self.sums}{words.get(self.products, '')}"


def candidates(products: bool, dtype: str, output: str) -> Iterator[Arithmetic]:
    """The space: every format of the sums that is not below the operands', and how products enter."""
    for sums in dict.fromkeys(("float32", "float64", output)):
        if PRECISION[sums] < PRECISION[dtype] or (dtype == "float64" and sums != "float64"):
            continue
        if not products:
            yield Arithmetic(sums, "none")
        elif 2 * PRECISION[dtype] <= PRECISION[sums]:
            yield Arithmetic(sums, "exact")
        elif sums == "float32":
            yield from (Arithmetic(sums, "fused"), Arithmetic(sums, "rounded"))
        else:  # float64's own fused multiply-add, and narrow ones, are not emulated
            yield Arithmetic(sums, "rounded")


def evaluate(
    tree: Tree, x: Float64Array, y: Float64Array | None, arithmetic: Arithmetic, output: str, factor: float = 1.0
) -> Float64Array:
    """The sums of ``x`` (times ``y``), [draws, n], in the order of a binary ``tree``, rounded once to ``output``.

    Args:
        factor: a power of two that the sum is multiplied by in the end, as a mean does.

    Returns:
        float64 [draws], values of ``output``.
    """

    def add(children: list[Float64Array | int]) -> Float64Array | int:
        left, right = children
        return _add(left, right, x, y, arithmetic)

    total = fold(tree, lambda leaf: leaf, add)
    return narrow(_value(total, x, y, arithmetic) * factor, output)


def _add(
    left: Float64Array | int, right: Float64Array | int, x: Float64Array, y: Float64Array | None, arithmetic: Arithmetic
) -> Float64Array:
    if arithmetic.products == "fused" and y is not None and (isinstance(left, int) or isinstance(right, int)):
        leaf, other = (right, left) if isinstance(right, int) else (left, right)
        assert isinstance(leaf, int)
        addend = _value(other, x, y, arithmetic)
        parts = (x[:, leaf].astype(np.float32), y[:, leaf].astype(np.float32), addend.astype(np.float32))
        return fma(*parts).astype(np.float64)
    return narrow(_value(left, x, y, arithmetic) + _value(right, x, y, arithmetic), arithmetic.sums)


def _value(node: Float64Array | int, x: Float64Array, y: Float64Array | None, arithmetic: Arithmetic) -> Float64Array:
    if not isinstance(node, int):
        return node
    value = x[:, node] if y is None else x[:, node] * y[:, node]
    return narrow(value, arithmetic.sums)


def narrow(x: Float64Array, name: str) -> Float64Array:
    """``x`` rounded to nearest, ties to even.

    A sum of two float32 values in float64 may be rounded itself; rounding it again to float32 then gives what one
    rounding gives, since 53 >= 2 * 24 + 2 (Figueroa 1995).
    """
    if name == "float64":
        return x
    if name == "float32":
        return x.astype(np.float32).astype(np.float64)
    return round_to(x, FORMATS[name]).astype(np.float64)
