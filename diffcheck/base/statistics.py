"""Figures over logprobs of two sides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass
class LogprobStats:
    """Logprobs of the response tokens. Differences in nats; k1 and k3 estimate KL(left || right) per token.

    k1 = mean(l - r), k3 = mean(exp(r - l) - 1 - (r - l)) with l, r the left and right logprobs (Schulman's estimators).
    """

    compared: int
    mismatch_count: int
    max_abs_diff: float
    mean_abs_diff: float
    k1: float
    k3: float

    @classmethod
    def of(cls, left: npt.NDArray[np.float64], right: npt.NDArray[np.float64], mismatch: int) -> LogprobStats:
        if not left.size:
            return cls(0, 0, 0.0, 0.0, 0.0, 0.0)
        # Equal infinities do not differ; everything else follows IEEE, so a NaN stays visible.
        with np.errstate(invalid="ignore", over="ignore"):
            delta = np.where(left == right, 0.0, right - left)
            return cls(
                compared=int(left.size),
                mismatch_count=mismatch,
                max_abs_diff=float(np.abs(delta).max()),
                mean_abs_diff=float(np.abs(delta).mean()),
                k1=float(-delta.mean()),
                k3=float((np.expm1(delta) - delta).mean()),
            )
