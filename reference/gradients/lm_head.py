"""Gradients of the projection onto the vocabulary: the float32 gradient of the logits is rounded, then as `linear`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reference.gradients.linear import LinearBackwardContract


@dataclass(frozen=True)
class LmHeadBackwardContract(LinearBackwardContract):
    """dx[t, k] = sum over v of dlogits[t, v] * weight[v, k];  dweight[v, k] = sum over t of dlogits[t, v] * x[t, k]"""

    operator: ClassVar[str] = "lm_head_backward"
