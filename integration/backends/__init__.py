"""The operators of a strict profile for engines, by what computes them.

- `interface`: what an engine may ask.
- `arrays`: the reference on a CPU, or `loops`, the same bits from compiled loops.
- `kernels`: the kernels of `fastpath` on a GPU (or in Triton's interpreter).
"""

from __future__ import annotations

from typing import Any

from integration.backends.interface import STRICT, BackendError, Logsumexp, Operators, check_profile

__all__ = ["STRICT", "BackendError", "Logsumexp", "Operators", "check_profile", "operators_for"]


def operators_for(profile: str, dtype: Any, device: Any = "cpu") -> Operators:
    """The operators of ``profile`` for tensors of torch ``dtype`` on ``device``.

    Raises:
        ValueError: as `check_profile`.
        BackendError: nothing computes that profile there: another vendor's matrix unit, a GPU without checked kernels,
            no Triton.
    """
    name, kind = check_profile(profile), str(device).partition(":")[0]
    if kind == "cpu":
        from integration.backends.arrays import ArrayOperators

        arrays: Operators = ArrayOperators(name, dtype)
        return arrays
    if kind != "cuda":
        raise BackendError(f"profile {name}: nothing computes it on device {device}; choose cpu or cuda")
    try:
        from integration.backends.kernels import KernelOperators
    except ImportError as error:
        raise BackendError(
            f"profile {name} on {device} needs the kernels, which need {error.name}: pip install 'rlk[fastpath]'"
        ) from error
    kernels: Operators = KernelOperators(name, dtype)
    return kernels
