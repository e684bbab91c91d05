"""Rotary embedding tables: cosine and sine per position and frequency, computed once on the host and hashed.

Devices compute neither sine nor cosine: their libraries disagree, so the contract is a table with a SHA-256.

Source: Su et al. 2021, "RoFormer", section 3.4: angle of position m and pair i = m * theta^(-2 i / d).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import mpmath
import numpy as np

from reference.checks import Float32Array
from reference.primitives.correctly_rounded import round_with_ziv_test
from reference.primitives.rope_scaling import RopeParameters, exact_frequencies


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines, float32, shape [positions, head_dim / 2], read-only."""

    cos: Float32Array
    sin: Float32Array

    @property
    def sha256(self) -> str:
        """SHA-256, in hexadecimal, of the cosines then the sines as little-endian float32 in C order."""
        digest = hashlib.sha256()
        for table in (self.cos, self.sin):
            digest.update(np.ascontiguousarray(table).astype("<f4").tobytes())
        return digest.hexdigest()


def inverse_frequencies(head_dim: int, theta: float | RopeParameters) -> Float32Array:
    """theta^(-2 i / head_dim) for i in [0, head_dim / 2), scaled as the parameters say, each correctly rounded.

    Raises:
        ValueError: `head_dim` is not a positive even number, or `theta` is not above 1.
    """
    rope = theta if isinstance(theta, RopeParameters) else RopeParameters(theta)
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim: expected a positive even number, got {head_dim}")
    if not rope.theta > 1:
        raise ValueError(f"theta: expected a base above 1, got {rope.theta}")
    return exact_frequencies(head_dim, rope)


def rope_table(positions: int, head_dim: int, theta: float | RopeParameters) -> RopeTable:
    """The table for positions 0 .. `positions` - 1.

    angle = position * inverse frequency with one rounding to float32; cosine and sine of that float32 angle are
    correctly rounded to float32, and so is their product with an attention factor other than 1.

    Raises:
        ValueError: as `inverse_frequencies`; or `positions` is not in [1, 2^24], where float32 holds every integer.
    """
    if not 1 <= positions <= 2**24:
        raise ValueError(f"positions: expected 1 to 2^24, got {positions}")
    position = np.arange(positions, dtype=np.float32)[:, None]
    angle = position * inverse_frequencies(head_dim, theta)[None, :]
    return table_of_angles(angle, theta.attention_factor if isinstance(theta, RopeParameters) else 1.0)


def table_of_angles(angle: Float32Array, attention_factor: float = 1.0) -> RopeTable:
    """Cosines and sines of float32 angles [positions, head_dim / 2], correctly rounded, times the attention factor."""
    exact = angle.astype(np.float64)
    tables = (
        round_with_ziv_test(np.cos(exact), angle, mpmath.cos),
        round_with_ziv_test(np.sin(exact), angle, mpmath.sin),
    )
    if attention_factor != 1.0:
        tables = (tables[0] * np.float32(attention_factor), tables[1] * np.float32(attention_factor))
    for table in tables:
        table.setflags(write=False)
    return RopeTable(*tables)
