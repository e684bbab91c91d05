"""Inputs over which the accuracy of a primitive is stated."""

from __future__ import annotations

EVERYWHERE = (-float("inf"), float("inf"))
#: exp(-x) is infinite from the next float32 down, while the logistic function is still a subnormal number there.
LOGISTIC = (-float.fromhex("0x1.62e42ep6"), float("inf"))
#: Narrower domains: `exp2_nonpositive` gives up subnormal results.
DOMAINS = {
    "exp2_nonpositive/rlk": (-126.0, 0.0),
    "sigmoid/rlk": LOGISTIC,
    "silu/rlk": LOGISTIC,
}


def domain(subject: str) -> tuple[float, float]:
    """Smallest and largest input whose error counts."""
    return DOMAINS.get(subject, EVERYWHERE)
