"""How an output matrix is walked for speed; no output element depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from reference.checks import Float32Array

#: Elements of a tile: with 4 to 20 bytes each its arrays stay in the L2 cache.
AREA = 65536
#: Edge of the squares that transpose in the L1 cache.
EDGE = 64
#: Most columns of a tile: NumPy runs one inner loop per row, so wide tiles cost least.
WIDTH = 2048


def tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Row and column slices of the tiles that cover [rows, columns], column by column of tiles."""
    width = max(1, min(columns, WIDTH))
    height = max(1, AREA // width)
    for j in range(0, columns, width):
        for i in range(0, rows, height):
            yield slice(i, i + height), slice(j, j + width)


@contextmanager
def unbuffered() -> Iterator[None]:
    """Make NumPy broadcast short rows in place: by default it copies them to a buffer, three times the arithmetic."""
    previous = np.setbufsize(256)
    try:
        yield
    finally:
        np.setbufsize(previous)


def contiguous_rows(x: Float32Array) -> Iterator[Float32Array]:
    """The rows of `x` [K, n], each contiguous; a transposed matrix is copied by squares, 64 rows at a time."""
    if x.strides[1] == x.itemsize:
        yield from x
        return
    for start in range(0, x.shape[0], EDGE):
        rows = x[start : start + EDGE]
        copy = np.empty(rows.shape, np.float32)
        for left in range(0, rows.shape[1], EDGE):
            square = slice(left, left + EDGE)
            copy[:, square] = np.ascontiguousarray(rows[:, square].T).T
        yield from copy
