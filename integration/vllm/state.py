"""The operators of this process's vLLM worker: one profile, one dtype, one device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a native vLLM loads this module too, and shall load no more than it
    from integration.backends import Operators

#: Environment variable that chooses the profile in every process of vLLM.
PROFILE = "RLK_PROFILE"
_operators: Operators | None = None


def on_gpu() -> bool:
    """Whether this process's vLLM computes on a GPU, where the kernels are the operators."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda_alike())


def operators(dtype: Any) -> Operators:
    """The operators for a model of torch ``dtype`` on vLLM's device; made on first use.

    Raises:
        ValueError: an unknown profile, or a second dtype in one process.
        BackendError: nothing computes the profile on that device.
    """
    global _operators
    if _operators is None:
        from vllm.platforms import current_platform

        from integration.backends import operators_for

        _operators = operators_for(os.environ[PROFILE], dtype, current_platform.device_type)
    if _operators.dtype != dtype:
        raise ValueError(f"one strict worker holds one model: it is of {_operators.dtype}, asked for {dtype}")
    return _operators


def current() -> Operators:
    """The operators that the model already uses.

    Raises:
        RuntimeError: no strict layer has run in this process.
    """
    if _operators is None:
        raise RuntimeError("no strict layer has run: the model is not vLLM's with the strict plugin")
    return _operators
