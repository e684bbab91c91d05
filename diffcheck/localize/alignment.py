"""Logprobs that are the right numbers of the wrong tokens: one side's list is the other's, moved by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diffcheck.base.samples import Sample
from diffcheck.localize.preflight import Mismatch
from diffcheck.trace.reader import Trace

#: Fewer pairs of equal bits than this may be chance.
_ENOUGH = 3


def misaligned(samples: Sequence[Sample], left: Trace, right: Trace) -> Mismatch | None:
    """The mismatch, if every right logprob has the bits of the left one a token before it (or after it).

    Asked where both sides computed the same distributions, so that nothing but the bookkeeping can be at fault.
    """
    if left.entry("logprobs").dtype != right.entry("logprobs").dtype:
        return None
    a, b = left.values("logprobs")[:, 0], right.values("logprobs")[:, 0]
    ends = np.cumsum([len(s.response_token_ids) for s in samples])
    for shift, word in ((1, "previous"), (-1, "next")):
        pairs = [
            (x[:-1], y[1:]) if shift > 0 else (x[1:], y[:-1])
            for x, y in zip(np.split(a, ends[:-1]), np.split(b, ends[:-1]), strict=True)
        ]
        theirs, ours = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        if len(np.unique(theirs)) >= _ENOUGH and np.array_equal(theirs, ours):
            return Mismatch("alignment", "each token's own logprob", f"the logprob of the {word} token")
    return None
