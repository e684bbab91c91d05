"""Find a kernel's order by designed inputs, then hold order and arithmetic against its bits on random ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.progress import Progress, silent
from diffcheck.infer.active.arithmetic import Arithmetic, candidates, evaluate, narrow
from diffcheck.infer.active.kernel import MARKS, PRECISION, Float64Array, Kernel
from diffcheck.infer.active.tree import OutsideError, Tree, describe, is_binary, reveal, to_text

#: Random sums that a candidate must give in every bit, and the seed of their draws.
DRAWS, SEED = 200, 0


@dataclass(frozen=True)
class Answer:
    """What a probe found."""

    kernel: Kernel
    #: Of the output.
    output: str
    #: None: what was counted belongs to no tree.
    tree: Tree | None
    #: Why there is no tree, or no arithmetic.
    outside: str
    #: Candidate -> random sums whose bits it does not give, of ``draws``.
    trials: dict[Arithmetic, int] = field(default_factory=dict)
    draws: int = 0
    calls: int = 0

    @cached_property
    def order(self) -> str | None:
        """The tree in words."""
        return None if self.tree is None else describe(self.tree)

    @property
    def arithmetic(self) -> list[Arithmetic]:
        """The candidates that give every bit."""
        return [candidate for candidate, differing in self.trials.items() if not differing]

    @property
    def exit_code(self) -> ExitCode:
        """EQUAL when order and arithmetic give the kernel's bits, else INCONCLUSIVE."""
        return ExitCode.EQUAL if self.arithmetic else ExitCode.INCONCLUSIVE

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kernel": self.kernel.name,
            "form": self.kernel.form,
            "summands": self.kernel.length,
            "operands": self.kernel.dtype,
            "output": self.output,
            "order": self.order,
            "tree": None if self.tree is None else to_text(self.tree),
            "outside": self.outside,
            "arithmetic": [str(candidate) for candidate in self.arithmetic],
            "trials": [
                {"arithmetic": str(candidate), "compared": self.draws, "differing": differing}
                for candidate, differing in self.trials.items()
            ],
            "calls": self.calls,
        }


def probe(kernel: Kernel, progress: Progress = silent) -> Answer:
    """Order and arithmetic of ``kernel``.

    Raises:
        InputError: a kernel that adds no such summands, or that raises.
    """
    calls, output = 0, ""

    def run(x: Float64Array, y: Float64Array | None = None) -> float:
        nonlocal calls, output
        calls += 1
        if calls % 64 == 0:
            progress(f"probe {kernel.name}", calls, 0)
        value, output = kernel.run(x, y if y is not None or not kernel.products else np.ones(kernel.length))
        return value

    n = kernel.length
    large, unit = MARKS[kernel.dtype]
    ones = np.full(n, unit)
    total = run(ones)
    # as many ones at a time as the output can count
    block = min(n, 2 ** PRECISION.get(output, 1))
    blocks = [np.where((np.arange(n) // block == i), unit, 0.0) for i in range(-(-n // block))]
    each = run(blocks[0]) / (block * unit)
    if not each or not math.isfinite(each):
        raise InputError(
            f"{kernel.name}: {block} ones give {each * block}: it does not add them",
            "probe a sum, a product or a mean of them",
        )

    def under(i: int, j: int) -> int:
        left = n
        for part in blocks:
            x = part.copy()
            x[i], x[j] = large, -large
            count = run(x) / (each * unit)
            # a mean of 100 rounds its counts; whether they were counts the tree decides, and the random sums
            if not (abs(count - (nearest := round(count)) if math.isfinite(count) else count) < 1 / 16):
                raise OutsideError(f"of {n} summands {count} are counted when {i} and {j} cancel")
            left -= nearest
        return left

    try:
        if run(ones) != total:
            raise OutsideError("it does not repeat itself")
        tree = reveal(under, n)
    except OutsideError as error:
        return Answer(kernel, output, None, str(error), calls=calls)
    if not is_binary(tree):
        reason = "several summands are added at once: how their node rounds is not searched"
        return Answer(kernel, output, tree, reason, calls=calls)
    factor = each
    if math.frexp(factor)[0] != 0.5:
        reason = f"the sum is multiplied by {factor}: choose a length for which that is a power of two"
        return Answer(kernel, output, tree, reason, calls=calls)
    x, y = _draw(kernel, 0), _draw(kernel, 1) if kernel.products else None
    found = [run(x[i], None if y is None else y[i]) for i in range(DRAWS)]
    trials = {}
    for candidate in candidates(kernel.products, kernel.dtype, output):
        expected = evaluate(tree, x, y, candidate, output, factor)
        trials[candidate] = int(np.count_nonzero(_bits(np.array(found)) != _bits(expected)))
    outside = "" if 0 in trials.values() else "no arithmetic of the space gives its bits in this order"
    return Answer(kernel, output, tree, outside, trials, DRAWS, calls)


def _draw(kernel: Kernel, stream: int) -> Float64Array:
    """Normal deviates times powers of two between 2^-6 and 2^6: an order shows in most of their sums."""
    rng = np.random.default_rng((SEED, stream))
    shape = (DRAWS, kernel.length)
    return narrow(rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape)), kernel.dtype)


def _bits(x: Float64Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bit patterns; a NaN is one class. Widening to float64 is exact."""
    return np.where(np.isnan(x), np.float64("nan"), x).view(np.int64)
