"""Checks of tensor arguments that the row kernels share, and the Triton type of a contract's format."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl

from fastpath.backend import DTYPES, UnsupportedError, require_fields, require_tensor
from reference.contract.base import Contract, Value

TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
INDEX_TYPES = (torch.int32, torch.int64)


@lru_cache(maxsize=256)
def accepted(
    contract: Contract,
    implemented: tuple[tuple[str, Value | tuple[Value, ...]], ...],
    path: str = "rounding.output",
) -> torch.dtype:
    """The dtype at ``path`` of a contract, if a kernel implements the contract; asked at every launch, so remembered.

    Raises:
        UnsupportedError: as ``require_fields``, or a format without kernels.
    """
    require_fields(contract, dict(implemented))
    return model_dtype(contract, path)


def model_dtype(contract: Contract, path: str = "rounding.output") -> torch.dtype:
    """The torch dtype of the format at ``path``.

    Raises:
        UnsupportedError: a format without kernels (float16, fp8).
    """
    name = str(contract.get(path))
    if name not in DTYPES:
        raise UnsupportedError(f"{contract.operator}: {path} {name} has no kernel; choose {' or '.join(DTYPES)}")
    return DTYPES[name]


def require_rows(tensor: torch.Tensor, argument: str, axes: str, *dtypes: torch.dtype) -> torch.Tensor:
    """As ``require_tensor``, for a tensor whose first axis may have any stride: a slice of a packed projection.

    Raises:
        TypeError, ValueError: as ``require_tensor``.
    """
    if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[0] > 1 and tensor[0].is_contiguous():
        require_tensor(tensor[:1], argument, _unpin_first(axes), *dtypes)
        first = axes.split(", ")[0].partition("=")[2]
        if first and tensor.shape[0] != int(first):
            raise ValueError(f"{argument}: expected shape [{axes}], got {list(tensor.shape)}")
        return tensor
    return require_tensor(tensor, argument, axes, *dtypes)


def _unpin_first(axes: str) -> str:
    first, *others = axes.split(", ")
    return ", ".join([first.partition("=")[0], *others])
