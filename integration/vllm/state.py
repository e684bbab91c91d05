"""The operators of this process's vLLM worker: one profile, one dtype."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a native vLLM loads this module too, and shall load no more than it
    from integration.operators import StrictOperators

#: Environment variable that chooses the profile in every process of vLLM.
PROFILE = "RLK_PROFILE"
_operators: StrictOperators | None = None


def operators(dtype: Any) -> StrictOperators:
    """The operators for a model of torch ``dtype``; made on first use.

    Raises:
        ValueError: an unknown profile, or a second dtype in one process.
    """
    global _operators
    if _operators is None:
        from integration.operators import StrictOperators

        _operators = StrictOperators(os.environ[PROFILE], dtype)
    if _operators.dtype != dtype:
        raise ValueError(f"one strict worker holds one model: it is of {_operators.dtype}, asked for {dtype}")
    return _operators


def current() -> StrictOperators:
    """The operators that the model already uses.

    Raises:
        RuntimeError: no strict layer has run in this process.
    """
    if _operators is None:
        raise RuntimeError("no strict layer has run: the model is not vLLM's with the strict plugin")
    return _operators
