"""What a report draws and a verdict does not hold: distributions over elements, rows and tokens, read from the traces.

One pass over the boundaries that differ, block by block; only counts and one number a row are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diffcheck.base.bits import UIntArray, compare, to_float32
from diffcheck.base.progress import Progress, silent
from diffcheck.base.samples import Sample
from diffcheck.localize.compare import Histogram, histogram, paired_blocks
from diffcheck.localize.verdict import BoundaryResult, Verdict
from diffcheck.report.folding import layer_of
from diffcheck.rows import Rows, expected_rows
from diffcheck.trace.reader import Trace

FloatArray = npt.NDArray[np.float64]
#: Distance of a row that differs by nothing but the sign of a zero.
_LEAST = 1e-30


@dataclass(frozen=True)
class LayerRows:
    """How far one layer's rows are apart, at the boundary that hands on to the next layer."""

    label: str
    boundary: str
    #: [rows], |left - right| / |left| in the 2-norm; 0 where the row is equal, NaN where it differs by an unknown
    #: amount because a trace holds its digest only.
    distance: FloatArray


@dataclass(frozen=True)
class Tokens:
    """Logprobs of the response tokens, in nats, with the place each is predicted from."""

    rows: Rows
    left: FloatArray
    right: FloatArray

    @property
    def difference(self) -> FloatArray:
        """|left - right|; equal infinities do not differ."""
        with np.errstate(invalid="ignore"):
            gap: FloatArray = np.abs(self.left - self.right)
        gap[self.left == self.right] = 0.0
        return gap


@dataclass
class Measured:
    """Everything that is drawn from the traces' values."""

    #: Of boundaries that differ and whose values both traces hold.
    histograms: dict[str, Histogram] = field(default_factory=dict)
    layers: list[LayerRows] = field(default_factory=list)
    tokens: Tokens | None = None
    #: Sample and position of every row that is fed forward.
    rows: Rows | None = None


def measure(verdict: Verdict, left: Trace, right: Trace, progress: Progress = silent) -> Measured:
    """Read what ``verdict``'s traces tell about its differences; empty where the objects were not comparable.

    Raises:
        TraceError: a trace turns out to be damaged; file and boundary are named.
    """
    measured = Measured()
    if not verdict.boundaries:
        return measured
    every = expected_rows([Sample.from_json(s) for s in left.header.samples])
    measured.rows = every["all"]
    differing = [r for r in verdict.boundaries if r.status in ("origin", "receiver")]
    for done, result in enumerate(differing):
        progress("measuring differences", done, len(differing))
        found = histogram(result.name, left, right)
        if found is not None:
            measured.histograms[result.name] = found
    measured.layers = [_distances(label, name, left, right) for label, name in _streams(verdict.boundaries)]
    if verdict.logprobs is not None:
        a, b = (_values(t.values("logprobs"), t, "logprobs")[:, 0] for t in (left, right))
        measured.tokens = Tokens(every["response"], a, b)
    return measured


def _streams(results: list[BoundaryResult]) -> list[tuple[str, str]]:
    """(label, boundary) of what each layer hands on: its last boundary that both sides saw, and the ends around."""
    seen = [r.name for r in results if r.status != "unobserved"]
    last = {layer: name for name in seen if (layer := layer_of(name)) is not None}
    around = {"embed_tokens": "embed", "norm": "norm"}
    return [
        *((label, name) for name, label in around.items() if name == "embed_tokens" and name in seen),
        *last.items(),
        *((label, name) for name, label in around.items() if name == "norm" and name in seen),
    ]


def _distances(label: str, boundary: str, left: Trace, right: Trace) -> LayerRows:
    a, b = left.entry(boundary), right.entry(boundary)
    distance = np.full(a.shape[0], np.nan)
    if a.dtype == b.dtype:
        distance[(left.digests(boundary) == right.digests(boundary)).all(axis=1)] = 0.0
    if "digest" not in (a.level, b.level):
        for rows, x, y in paired_blocks(boundary, left, right):
            u, v = _values(x, left, boundary), _values(y, right, boundary)
            with np.errstate(all="ignore"):
                apart = np.linalg.norm(np.where(u == v, 0.0, u - v), axis=1) / np.linalg.norm(u, axis=1)
            # A row that differs is never drawn as equal: not for the sign of a zero, nor for a NaN.
            apart = np.where(np.isnan(apart), np.inf, np.maximum(apart, _LEAST))
            distance[rows] = np.where(compare(x, a.dtype, y, b.dtype).rows, apart, 0.0)
    return LayerRows(label, boundary, distance)


def _values(bits: UIntArray, trace: Trace, boundary: str) -> FloatArray:
    # A signalling NaN warns when it is widened.
    with np.errstate(invalid="ignore"):
        return to_float32(bits, trace.entry(boundary).dtype).astype(np.float64)
