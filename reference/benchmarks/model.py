"""Times of whole forwards, as `reference.benchmarks.forward` measures them."""

from __future__ import annotations

from collections.abc import Iterator

from reference.benchmarks import forward
from reference.benchmarks.measure import Measurement


def measurements() -> Iterator[Measurement]:
    """One line a forward; the figure is its wall-clock time, with the most it may take as target."""
    for timed in forward.measurements():
        seconds = timed.seconds
        yield Measurement(timed.what, "", seconds, seconds, seconds, "s", timed.target, more_is_better=False)
    peak = forward.peak_memory()
    yield Measurement("peak memory, weights included", "", 0, 0, peak, "GiB", 2.0, more_is_better=False)
