"""The same samples once more as an engine really serves them: compiled, out of CUDA graphs, with nobody looking.

A capture that observes boundaries runs the model module by module. What it says holds for the replayed graphs exactly
if both give the same logprobs, which this counts.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from diffcheck.base.bits import canonical
from diffcheck.base.samples import Sample
from diffcheck.capture.plan import CapturePlan
from diffcheck.capture.session import EngineSession
from diffcheck.trace.reader import Trace


def graph_run(session: EngineSession, plan: CapturePlan, observed: Sequence[Sample]) -> dict[str, Any]:
    """Run ``plan`` again without observing anything, and compare its logprobs with those of the ``observed`` samples.

    Args:
        session: of an engine that was started with graphs.
        plan: of the capture that observed. Its trace stays; this run's goes.

    Returns:
        As `differences`, and ``modes``: mode of graphs -> forwards; ``strict``, where a profile is followed: what ran.
    """
    out = plan.out.with_name(f"{plan.out.name}.graphs")
    shutil.rmtree(out, ignore_errors=True)
    again = replace(plan, samples=tuple(observed), out=out, observe=False, interventions=(), level="digest")
    try:
        result = session.capture(again)
        evidence = Trace(result.trace).header.evidence
    finally:
        shutil.rmtree(out, ignore_errors=True)
    found = differences(observed, result.samples)
    strict = {"strict": evidence["strict"]} if "strict" in evidence else {}
    return {**found, "modes": evidence["scheduler"]["graph_modes"], **strict}


def differences(observed: Sequence[Sample], replayed: Sequence[Sample]) -> dict[str, Any]:
    """``compared`` logprobs, ``mismatch_count`` of other bits (NaN as a class), ``max_abs_diff`` in nats, and the
    ``first`` of them: sample and response token.
    """
    pairs = [(a.rollout_logprobs or (), b.rollout_logprobs or ()) for a, b in zip(observed, replayed, strict=True)]
    places = [(number, token) for number, (a, _) in enumerate(pairs) for token in range(len(a))]
    left, right = (np.array([x for pair in pairs for x in pair[side]], np.float32) for side in (0, 1))
    if left.shape != right.shape:
        raise ValueError(f"{left.size} observed logprobs, {right.size} of the graphs")
    unequal = canonical(left.view(np.uint32), "float32") != canonical(right.view(np.uint32), "float32")
    first = places[int(unequal.argmax())] if unequal.any() else None
    with np.errstate(invalid="ignore"):
        most = float(np.abs(left[unequal].astype(np.float64) - right[unequal]).max()) if unequal.any() else 0.0
    return {
        "compared": int(left.size),
        "mismatch_count": int(unequal.sum()),
        "max_abs_diff": most,
        "first": None if first is None else {"sample": first[0], "token": first[1]},
    }


def note_of(side: str, found: dict[str, Any]) -> str:
    """One sentence on `graph_run`'s answer."""
    modes = ", ".join(f"{count} forwards {mode}" for mode, count in sorted(found["modes"].items()))
    if not found["mismatch_count"]:
        return f"{side}: its CUDA graphs gave the same {found['compared']} logprobs, in bits ({modes})."
    return (
        f"{side}: its CUDA graphs gave other bits for {found['mismatch_count']} of {found['compared']} logprobs than "
        f"the observed run, at most {found['max_abs_diff']:.3g} nats off ({modes}): the verdict is on the observed run."
    )
