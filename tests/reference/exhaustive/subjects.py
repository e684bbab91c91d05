"""What is checked on every float32 bit pattern: each cast, each primitive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from reference.formats import FORMATS, Format, decode, encode
from reference.primitives import PRIMITIVES
from reference.rounding import Mode, Overflow, round_to
from tests.reference.exhaustive import oracle
from tests.reference.exhaustive.domains import domain

Float32Array = NDArray[np.float32]

#: The types of other libraries that round as `rne` with the overflow of the second column.
PEERS: dict[str, tuple[Any, Overflow]] = {
    "bfloat16": (ml_dtypes.bfloat16, "infinity"),
    "float16": (np.float16, "infinity"),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, "nan"),
    "float8_e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, "nan"),
    "float8_e5m2": (ml_dtypes.float8_e5m2, "infinity"),
}


@dataclass
class Outcome:
    """What one run over some inputs found; outcomes of disjoint inputs merge."""

    inputs: int = 0
    mismatches: int = 0
    #: Bit patterns of the first mismatches.
    examples: list[str] = field(default_factory=list)
    #: Largest error in units in the last place, and its input in C's hexadecimal notation.
    worst_ulp: float | None = None
    worst_x: str | None = None
    #: Results that are not correctly rounded, of how many inputs inside the domain.
    misrounded: int | None = None
    measured: int | None = None

    def merge(self, other: Outcome) -> None:
        """Add the findings of other inputs."""
        self.inputs += other.inputs
        self.mismatches += other.mismatches
        self.examples = (self.examples + other.examples)[:8]
        if other.worst_ulp is None:
            return
        if self.worst_ulp is None or other.worst_ulp > self.worst_ulp:
            self.worst_ulp, self.worst_x = other.worst_ulp, other.worst_x
        self.misrounded = (self.misrounded or 0) + (other.misrounded or 0)
        self.measured = (self.measured or 0) + (other.measured or 0)


Subject = Callable[[Float32Array], Outcome]


def compare(x: Float32Array, ours: NDArray[Any], theirs: NDArray[Any], nan_as_class: bool) -> Outcome:
    """Mismatching bits of two results; with `nan_as_class` any NaN equals any other."""
    unsigned = np.dtype(f"u{ours.itemsize}")
    different = ours.view(unsigned) != theirs.view(unsigned)
    if nan_as_class:
        different &= ~(np.isnan(ours) & np.isnan(theirs))
    examples = [f"{int(bits):#010x}" for bits in x[different][:8].view(np.uint32)]
    return Outcome(x.size, int(different.sum()), examples)


def random_bits_for(x: Float32Array) -> NDArray[np.uint32]:
    """32 bits that depend on the input's bits alone: Knuth's multiplicative hash, mixed once."""
    u = x.view(np.uint32) * np.uint32(2654435761)
    return u ^ (u >> np.uint32(15))


def cast(fmt: Format, mode: Mode, overflow: Overflow) -> Subject:
    """`round_to` against the C oracle's codes through `decode`; for `rne`, its values through `encode` too."""

    def run(x: Float32Array) -> Outcome:
        random = random_bits_for(x) if mode == "stochastic" else None
        rounded = round_to(x, fmt, mode, overflow, random)
        codes = oracle.round_codes(x, fmt, mode, overflow, random)
        outcome = compare(x, rounded, decode(codes, fmt), nan_as_class=False)
        if mode == "rne" and overflow != "saturate":
            wrong_code = compare(x, encode(rounded, fmt), codes, nan_as_class=False)
            outcome.mismatches += wrong_code.mismatches
            outcome.examples += wrong_code.examples
        return outcome

    return run


def peer_cast(fmt: Format) -> Subject:
    """`round_to` against the conversion of ml_dtypes, or NumPy for float16; NaN as a class."""
    dtype, overflow = PEERS[fmt.name]

    def run(x: Float32Array) -> Outcome:
        with np.errstate(all="ignore"):
            theirs = x.astype(dtype).astype(np.float32)
        return compare(x, round_to(x, fmt, "rne", overflow), theirs, nan_as_class=True)

    return run


def primitive(function: str, variant: str) -> Subject:
    """A primitive against its sequence in C; NaN as a class; and its accuracy."""
    evaluate, name = PRIMITIVES[function][variant], f"{function}/{variant}"

    def run(x: Float32Array) -> Outcome:
        if function == "exp2_nonpositive":
            x = x[~(x > 0)]
        ours = evaluate(x)
        outcome = compare(x, ours, oracle.primitive(name, x), nan_as_class=True)
        accuracy = oracle.measure(name, x, ours, domain(name))
        if accuracy.measured:
            outcome.worst_ulp, outcome.worst_x = accuracy.worst, float(accuracy.worst_x).hex()
            outcome.misrounded, outcome.measured = accuracy.misrounded, accuracy.measured
        return outcome

    return run


def _subjects() -> dict[str, Subject]:
    subjects: dict[str, Subject] = {}
    for function in PRIMITIVES:
        subjects[f"{function}/rlk"] = primitive(function, "rlk")
    narrow = [fmt for fmt in FORMATS.values() if fmt.name != "float32"]
    for fmt in narrow:
        native: Overflow = "infinity" if fmt.has_infinity else "nan"
        subjects[f"cast/{fmt.name}/rne/{native}"] = cast(fmt, "rne", native)
        if fmt.name in PEERS:
            subjects[f"cast/{fmt.name}/peer"] = peer_cast(fmt)
    subjects["rsqrt/uncompensated"] = primitive("rsqrt", "uncompensated")
    for function in PRIMITIVES:
        if function != "exp2_nonpositive":  # its correctly rounded variant is exp2's
            subjects[f"{function}/correctly-rounded"] = primitive(function, "correctly-rounded")
    modes: tuple[Mode, ...] = ("rne", "rtz", "rna", "odd", "stochastic")
    for mode in modes:
        for fmt in narrow:
            subjects[f"cast/{fmt.name}/{mode}/saturate"] = cast(fmt, mode, "saturate")
    return subjects


#: Every subject by name, the most important first.
SUBJECTS: dict[str, Subject] = _subjects()
