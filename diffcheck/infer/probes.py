"""Inputs that would decide what the recorded ones could not: generated, from a seed, until two contracts differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffcheck.infer import arguments as args
from diffcheck.infer.arguments import Arguments, call
from diffcheck.infer.trial import same_bits
from reference.checks import Float32Array
from reference.contract import Contract
from reference.formats import FORMATS
from reference.rounding import round_to

#: What is drawn, per element: a normal deviate times a scale, and for "wide" times a power of two between 2^-12 and
#: 2^12 too. Wide exponents make the order of a sum show; large values, the ends of exponentials.
KINDS = ("normal x 1", "normal x 8", "wide", "normal x 0.05")
_SEEDS = 4
_ROWS = 64


def probe_arguments(arguments: Arguments, kind: str, seed: int, dtype: str) -> Arguments:
    """``arguments`` with every float input replaced by generated values of ``dtype``; weights stay.

    Args:
        kind: one of `KINDS`.
    """
    rng = np.random.default_rng(seed)
    few = arguments.take(np.arange(min(len(arguments), _ROWS)))

    def draw(like: NDArray[Any]) -> Float32Array:
        x = rng.standard_normal(like.shape, np.float32)
        if kind == "wide":
            x *= np.exp2(rng.integers(-12, 13, like.shape)).astype(np.float32)
        else:
            x *= np.float32(kind.rpartition(" ")[2])
        return round_to(x, FORMATS[dtype])

    rows = {name: draw(v) if v.dtype == np.float32 else v for name, v in few.rows.items()}
    sequences = {s: args.Sequence(draw(kv.keys), draw(kv.values)) for s, kv in few.sequences.items()}
    return replace(few, rows=rows, sequences=sequences)


def decide(path: str, fits: Sequence[Contract], arguments: Arguments, dtype: str) -> dict[str, Any] | None:
    """An input on which two contracts of the class with different values of ``path`` differ: as plain data, or None."""
    for a, b in _pairs(path, fits):
        for kind in KINDS:
            for seed in range(_SEEDS):
                made = probe_arguments(arguments, kind, seed, dtype)
                try:
                    with np.errstate(all="ignore"):
                        differing = int(np.count_nonzero(~same_bits(call(made, a), call(made, b))))
                except ValueError:
                    break
                if differing:
                    values = [a.get(path), b.get(path)]
                    found = {"kind": kind, "seed": seed, "rows": len(made), "values": values, "differing": differing}
                    return {**found, "contract_ids": [a.contract_id, b.contract_id]}
    return None


def _pairs(path: str, fits: Sequence[Contract]) -> Iterator[tuple[Contract, Contract]]:
    """For the first contract, those that differ from it in ``path`` alone; if there is none, in ``path`` at least."""
    first = fits[0]
    for value in dict.fromkeys(c.get(path) for c in fits):
        if value == first.get(path):
            continue
        others = [c for c in fits if c.get(path) == value]
        yield first, min(others, key=lambda c: len(_differing(first, c)))


def _differing(a: Contract, b: Contract) -> list[str]:
    from reference.contract import diff

    return [d.path for d in diff(a, b)]
