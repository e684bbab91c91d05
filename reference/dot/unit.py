"""What a matrix unit is: the instruction as data, its arithmetic as one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reference.checks import Float32Array
from reference.formats import Format

#: accumulate(a [M, K], b [K, N], c [M, N], input format) -> [M, N], all float32.
Accumulate = Callable[[Float32Array, Float32Array, Float32Array, Format], Float32Array]


@dataclass(frozen=True)
class MatrixUnit:
    """One dot-product step of a piece of hardware, applied along ascending K."""

    #: Name that a contract carries.
    name: str
    #: Hardware whose bits it states.
    hardware: str
    #: Names of the formats of its operands (`reference.formats.FORMATS`).
    input_formats: tuple[str, ...]
    #: The step in words: group size, alignment, truncation, rounding, subnormals.
    arithmetic: str
    #: How we know: `measured`, or `modelled` against which oracle.
    evidence: str
    #: The arithmetic itself.
    accumulate: Accumulate
