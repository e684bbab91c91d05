"""Tiling of an output matrix for speed; no output element depends on it."""

from __future__ import annotations

from collections.abc import Iterator

#: Elements of a tile: with 4 to 20 bytes each its arrays stay in the L2 cache.
AREA = 65536
#: Most columns of a tile: NumPy runs one inner loop per row, so wide tiles cost least.
WIDTH = 2048


def tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Row and column slices of the tiles that cover [rows, columns], column by column of tiles."""
    width = max(1, min(columns, WIDTH))
    height = max(1, AREA // width)
    for j in range(0, columns, width):
        for i in range(0, rows, height):
            yield slice(i, i + height), slice(j, j + width)
