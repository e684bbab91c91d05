"""Row sum of PyTorch's CPU kernels: registers in flight, and levels of accumulators that pass their sums upwards."""

from __future__ import annotations

import numpy as np

from reference.checks import Float32Array
from reference.reductions.step import Step, accumulate, accumulate_chain, check_row, require_positive

LEVELS = 4
#: A level hands its sum on after 2^4 rounds at least.
LEAST_LEVEL_POWER = 4


def cascade(x: Float32Array, *, width: int = 8, registers: int = 4, step: Step = "add") -> Float32Array:
    """Cascade sum: error grows with the logarithm of n, at the price of a few more accumulators.

    A round adds one vector of `width` to each of the `registers`. After every 2^p rounds, where p is the larger of 4
    and ceil(log2(rounds)) / 4, level 0 is added to level 1 and cleared; level 1 to level 2 after 2^2p, and so on. At
    the end the levels merge upwards from 0, then the left-over vectors join register 0, then the registers merge in a
    chain. The elements that fill no vector are summed first, one by one from +0, and the lanes are added to them, lane
    0 first. A row shorter than a vector is cut into vectors of 1.

    Args:
        x: float32 [..., n], n >= 1.
        width: lanes of a vector: 8 in PyTorch's default (AVX2) reduction kernels, on AVX-512 machines too.
        registers: vectors in flight.

    Returns:
        float32 [...].

    Raises:
        TypeError, ValueError: as `check_row`; or a parameter out of range.
    """
    values = check_row(x, step)
    require_positive(width, "width")
    require_positive(registers, "registers")
    width = width if values.shape[-1] >= width else 1
    vectors = values.shape[-1] // width
    rounds = vectors // registers
    lanes = values[..., : vectors * width].reshape(*values.shape[:-1], vectors, width)
    body = lanes[..., : rounds * registers, :].reshape(*values.shape[:-1], rounds, registers * width)
    register = _levels(body, step).reshape(*values.shape[:-1], registers, width)
    total = register[..., 0, :]
    for vector in range(rounds * registers, vectors):
        total = accumulate(total, lanes[..., vector, :], step)
    for r in range(1, registers):
        total = accumulate(total, register[..., r, :], "add")
    tail = np.zeros(values.shape[:-1], np.float32)
    for i in range(vectors * width, values.shape[-1]):
        tail = accumulate(tail, values[..., i], step)
    return accumulate_chain(np.concatenate([tail[..., None], total], axis=-1)[..., None], "add")[..., 0]


def _levels(body: Float32Array, step: Step) -> Float32Array:
    """Sum over the second-to-last axis (rounds) through the levels of accumulators."""
    rounds = body.shape[-2]
    power = max(LEAST_LEVEL_POWER, (max(rounds, 1) - 1).bit_length() // LEVELS)
    level = [np.zeros((*body.shape[:-2], body.shape[-1]), np.float32) for _ in range(LEVELS)]
    for done in range(1, rounds + 1):
        level[0] = accumulate(level[0], body[..., done - 1, :], step)
        for j in range(1, LEVELS):
            if done % (1 << (j * power)):
                break
            level[j] = accumulate(level[j], level[j - 1], "add")
            level[j - 1] = np.zeros_like(level[j - 1])
    total = level[0]
    for j in range(1, LEVELS):
        total = accumulate(total, level[j], "add")
    return total
