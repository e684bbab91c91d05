"""Orders in which engines lay out the positions of a sequence."""

from __future__ import annotations


def zigzag_positions(length: int, ranks: int = 2) -> list[int]:
    """Positions as ring attention's context parallelism lays them out: of 2 * ranks chunks, rank r holds the r-th from
    the front and the r-th from the back, so that causal work is even.

    Chunks are as even as they get; Megatron pads sequences so that they are.
    """
    chunks = 2 * ranks
    bounds = [c * length // chunks for c in range(chunks + 1)]
    order = [c for r in range(ranks) for c in (r, chunks - 1 - r)]
    return [p for c in order for p in range(bounds[c], bounds[c + 1])]
