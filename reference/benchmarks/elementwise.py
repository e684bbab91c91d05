"""Rates of casts, primitives and row reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from reference.benchmarks.measure import Measurement, best_times
from reference.formats import FORMATS
from reference.primitives import PRIMITIVES
from reference.reductions import REDUCTIONS
from reference.rounding import Overflow, round_to

COUNT = 1 << 20


def measurements() -> Iterator[Measurement]:
    """A million normal values through everything that works element by element, and rows of 4096 through the sums."""
    x = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    for name, fmt in FORMATS.items():
        overflow: Overflow = "infinity" if fmt.has_infinity else "nan"
        yield _measure(f"round_to {name}", partial(round_to, x, fmt, "rne", overflow))
    for function, variants in PRIMITIVES.items():
        argument = -np.abs(x) if function == "exp2_nonpositive" else np.abs(x)
        for variant, primitive in variants.items():
            yield _measure(f"{function} {variant}", partial(primitive, argument))
    for name, reduction in REDUCTIONS.items():
        yield _measure(f"sum {name}", partial(reduction, x.reshape(-1, 4096)))


def _measure(name: str, function: Callable[[], object]) -> Measurement:
    seconds, cpu = best_times(function, repeats=3)
    return Measurement(name, f"{COUNT} elements", seconds, cpu, COUNT / cpu / 1e6, "Melem/s")
