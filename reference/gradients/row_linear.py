"""Gradients of a row-parallel projection: every rank has all outputs, so its part of dx is one chain over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reference.contract.base import Group, choice
from reference.gradients._sums import ROW_BLOCKS, ROW_WORDS
from reference.gradients.linear import LinearBackwardContract


@dataclass(frozen=True)
class Partition(Group):
    segments: int = choice(
        (1, 2, 4, 8, 16), "cuts the outputs into at most {value} equal contiguous segment(s), as many as divide them"
    )
    rows: int = choice(ROW_BLOCKS, ROW_WORDS, equivalent="without a bias no rows are added")


@dataclass(frozen=True)
class RowLinearBackwardContract(LinearBackwardContract):
    """dx[t, k] = sum over n of dy[t, n] * weight[n, k];  dweight[n, k] = sum over t of dy[t, n] * x[t, k]
    dbias[n] = sum over t of dy[t, n]"""

    operator: ClassVar[str] = "row_linear_backward"
    partition: Partition = Partition()  # type: ignore[assignment]
