"""Logprobs of the prompts' tokens, as engines answer them: compared where both do, and said where not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diffcheck.base.bits import Difference, compare
from diffcheck.base.samples import Sample
from diffcheck.base.statistics import LogprobStats
from diffcheck.localize.verdict import FirstDivergence, Verdict
from diffcheck.trace.joined import samples_of
from diffcheck.trace.reader import Trace

#: Its name where it is what first diverges. No boundary of the graph: engines answer it from buffers of their own.
PROMPT_LOGPROBS = "prompt_logprobs"


def compare_prompts(verdict: Verdict, left: Trace, right: Trace) -> None:
    """Fill ``verdict.prompt_logprobs``, or say why it is empty. Where nothing else differs, a difference here makes the
    verdict diverged.

    Args:
        left, right: traces of the same samples in one order.
    """
    if verdict.verdict == "not_comparable":
        return
    ours, theirs = samples_of(left), samples_of(right)
    lacking = [
        f"the {role} side ({trace.header.engine}, {trace.header.phase}) returned none"
        for role, trace, samples in (("rollout", left, ours), ("train", right, theirs))
        if any(s.prompt_logprobs is None for s in samples)
    ]
    if lacking:
        verdict.prompts_not_compared = " and ".join(lacking)
        return
    a, b = _values(ours), _values(theirs)
    if not a.size:
        verdict.prompts_not_compared = "the prompts have one token each"
        return
    found = compare(a.view(np.uint32)[:, None], "float32", b.view(np.uint32)[:, None], "float32")
    verdict.prompt_logprobs = LogprobStats.of(a.astype(np.float64), b.astype(np.float64), found.differing)
    if verdict.verdict == "equal" and found.differing:
        _diverged(verdict, ours, a, b, found)


def _values(samples: Sequence[Sample]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array([x for s in samples for x in s.prompt_logprobs or ()], np.float32)


def _diverged(
    verdict: Verdict,
    samples: Sequence[Sample],
    a: np.ndarray[tuple[int], np.dtype[np.float32]],
    b: np.ndarray[tuple[int], np.dtype[np.float32]],
    found: Difference,
) -> None:
    places = [(i, p) for i, s in enumerate(samples) for p in range(len(s.prompt_token_ids) - 1)]
    at, differing = found.first, found.differing
    sample, position = places[at]
    equal = [r for r in verdict.boundaries if r.status == "equal"]
    verdict.verdict = "diverged"
    verdict.first_divergence = FirstDivergence(
        boundary=PROMPT_LOGPROBS,
        sample=sample,
        position=position,
        role="origin",
        elements=a.size,
        differing=differing,
        max_abs=found.max_abs,
        max_ulp=found.max_ulp,
        index=0,
        left=float(a[at]),
        right=float(b[at]),
        left_bits=f"0x{int(a.view(np.uint32)[at]):08x}",
        right_bits=f"0x{int(b.view(np.uint32)[at]):08x}",
        interval=[PROMPT_LOGPROBS],
        equal_before=len(equal),
        equal_elements_before=sum(r.elements for r in equal),
        rows_origin=differing,
        rows=a.size,
        dtypes=("float32", "float32"),
    )
    verdict.summary = (
        f"Every observed boundary and every logprob of the responses is equal, but {differing} of {a.size} prompt "
        f"logprobs are not, first at sample {sample}, position {position}: one side answered others than this forward "
        "gives, for example from a stale buffer or a cached prefix."
    )
