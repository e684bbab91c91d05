"""Tensors as the float32 arrays that the reference operators take, and back. No value changes on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from reference.checks import Float32Array

Tensor = Any
#: dtype names of contracts.
DTYPES = ("bfloat16", "float16", "float32")


def dtype_name(tensor_dtype: Any) -> str:
    """Name of a torch dtype as contracts carry it.

    Raises:
        TypeError: a dtype that no contract knows.
    """
    name = str(tensor_dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"dtype {name} has no strict contract; use one of {', '.join(DTYPES)}")
    return name


def to_array(tensor: Tensor) -> Float32Array:
    """The values of a CPU tensor as float32: a view where it is float32 already, else the exact widening."""
    array: Float32Array = tensor.detach().float().numpy()
    return array


def to_tensor(values: Float32Array, dtype: Any) -> Tensor:
    """A tensor of ``dtype`` with exactly these ``values``; a view where ``dtype`` is float32.

    Raises:
        ValueError: a value is not one of ``dtype``: an operator did not round where its contract says.
    """
    import torch

    if dtype == torch.float32:
        return torch.from_numpy(values)
    if dtype == torch.bfloat16:
        bits = np.ascontiguousarray(values).view(np.uint32)
        if np.bitwise_or.reduce(bits, axis=None) & 0xFFFF:
            raise ValueError("an operator returned float32 values where its contract rounds to bfloat16")
        return torch.from_numpy((bits >> 16).astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    narrow = values.astype(np.float16)
    if not np.array_equal(narrow.astype(np.float32), values, equal_nan=True):
        raise ValueError("an operator returned float32 values where its contract rounds to float16")
    return torch.from_numpy(narrow)
