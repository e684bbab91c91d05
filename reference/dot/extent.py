"""One pass over an operand that tells which faster, equal computation is legal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.checks import Float32Array

BLOCK = 65536


@dataclass(frozen=True)
class Extent:
    """Bounds on the values of an array."""

    #: Last bits that are zero in every bit pattern, at most 23.
    trailing_zeros: int
    #: Smallest nonzero magnitude; infinite if there is none.
    smallest: float
    #: Largest magnitude; infinite if a value is infinite or NaN.
    largest: float

    @property
    def significant_bits(self) -> int:
        """Upper bound on the width of a significand, the implicit one included."""
        return 24 - self.trailing_zeros

    @property
    def last_place(self) -> float:
        """A power of two, at most 1, that divides every nonzero value; the values are multiples of it."""
        exponent = max(int(np.frexp(self.smallest)[1]) - 1, -126) if np.isfinite(self.smallest) else 0
        return min(2.0 ** (exponent - 23 + self.trailing_zeros), 1.0)


def extent(x: Float32Array) -> Extent:
    """Bounds of a float32 array of any shape and memory order."""
    bits = x.ravel(order="K").view(np.uint32)
    used, smallest, largest = 0, 0xFFFFFFFF, 0
    for start in range(0, bits.size, BLOCK):
        magnitude = bits[start : start + BLOCK] & np.uint32(0x7FFFFFFF)
        used |= int(np.bitwise_or.reduce(magnitude))
        largest = max(largest, int(magnitude.max()))
        magnitude -= np.uint32(1)  # zeros wrap to the largest integer and drop out of the minimum
        smallest = min(smallest, int(magnitude.min()))
    trailing = min(23, (used & -used).bit_length() - 1) if used else 23
    return Extent(trailing, _magnitude(smallest + 1), _magnitude(largest))


def _magnitude(bits: int) -> float:
    """The float32 of a bit pattern, infinite for what is no finite number."""
    return float(np.uint32(bits).view(np.float32)) if bits < 0x7F800000 else float("inf")
