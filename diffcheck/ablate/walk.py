"""Walk on: align the origins one after the other, in dataflow order, and see what is left of the logprob mismatch.

With all earlier origins aligned, the next one has the donor's inputs in bits, so the donor's traced value is what the
donor's operator gives there: each step is exact and needs one forward of the host and no contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diffcheck.ablate.composite import Bench
from diffcheck.ablate.result import Origin
from diffcheck.ablate.sides import same
from diffcheck.base.statistics import LogprobStats

#: Origins up to which every step is run; beyond, the first and the last that matter are found by bisection.
STEPS = 24


def steps_planned(count: int) -> int:
    """Forwards that `walk` takes at most for ``count`` origins."""
    return count if count <= STEPS else 2 * count.bit_length() + 1


def walk(bench: Bench, origins: Sequence[Origin], tick: Callable[[str], None]) -> list[str]:
    """Fill `Origin.after`, ``explained`` and ``confirmed``; return the first and the last origin that matter.

    That the last one matters and none after it does is seen, not assumed: the two forwards on either side of it are
    run.

    Raises:
        VoidError: a substitution did not take place.
    """
    baseline = bench.baseline
    moved: dict[int, bool] = {0: False}
    left: dict[int, int] = {0: baseline.mismatch_count}

    def step(count: int) -> int:
        """Align the first ``count`` origins; how many logprobs still differ."""
        if count in left:
            return left[count]
        tick(f"walking on: {count} of {len(origins)} origins aligned")
        run = bench.host.spliced(bench.donor.trace, [o.boundary for o in origins[:count]])
        origin = origins[count - 1]
        origin.after = bench.against_donor(run.trace)
        first = next((name for name in bench.names if not same(run.trace, bench.donor.trace, name)), None)
        origin.confirmed = first == (origins[count].boundary if count < len(origins) else None)
        moved[count] = not same(run.trace, bench.host.trace, "logprobs")
        left[count] = origin.after.mismatch_count
        run.discard()
        return left[count]

    if len(origins) <= STEPS:
        for count in range(1, len(origins) + 1):
            step(count)
        first = next((n for n in sorted(moved) if moved[n]), len(origins))
        last = next((n for n in sorted(left) if not left[n]), len(origins))
    else:
        step(len(origins))
        first = _bisect(len(origins), lambda n: step(n) >= 0 and moved[n])
        last = len(origins) if left[len(origins)] else _bisect(len(origins), lambda n: step(n) == 0)
    _share(origins, baseline)
    return [origins[first - 1].boundary, origins[last - 1].boundary] if origins else []


def _bisect(high: int, holds: Callable[[int], bool]) -> int:
    """An n up to ``high`` that ``holds`` while n - 1 does not. ``high`` itself holds, and 0 does not."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _share(origins: Sequence[Origin], baseline: LogprobStats) -> None:
    before = baseline.mean_abs_diff
    for origin in origins:
        if origin.after is not None and baseline.mean_abs_diff:
            origin.explained = (before - origin.after.mean_abs_diff) / baseline.mean_abs_diff
            before = origin.after.mean_abs_diff
