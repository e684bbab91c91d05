"""One use of an operator, as the catalogue lists it: on tensors without data, with a strict contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastpath.backend import TARGETS
from reference.contract.profiles import profile
from reference.gradients import gradient_contract

HIDDEN, FEATURES, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 12288, 32, 8, 128, 151936
EPSILON = 1e-6


@dataclass(frozen=True)
class Call:
    """One use of an operator, on tensors of the device ``meta``."""

    name: str
    run: Callable[[], Any]
    #: Arithmetic profile; a target that lacks it refuses the call.
    unit: str = "fma32-seq"

    def required_on(self, arch: str) -> bool:
        """Whether ``arch`` must be able to run it."""
        return self.unit in TARGETS[arch].units


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def contract(operator: str, dtype: str, unit: str = "fma32-seq") -> Any:
    """The strict contract of ``operator``."""
    return profile(f"strict-v1/{unit}").contract(operator, dtype)


def gradient(operator: str, dtype: str, unit: str = "fma32-seq") -> Any:
    """The strict contract of the gradient of ``operator``."""
    return gradient_contract(contract(operator, dtype, unit))
