"""Run by test_gradients.py in a process with TRITON_INTERPRET=1: the kernels' gradients against the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from integration.backends.arrays import ArrayOperators
from integration.backends.kernels import KernelOperators
from tests.integration.gradient_cases import cases, differing, gradients, inputs

PROFILE = "strict-v1/fma32-seq"
NAMES = list(cases(ArrayOperators(PROFILE, torch.float32)))


#: The interpreter takes seconds for these; their float32 form runs in conformance.
SLOW = ("attention", "logprob", "lm_head", "gate_up", "row_linear")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, t) for n in NAMES for t in (torch.bfloat16, torch.float32) if t == torch.bfloat16 or n not in SLOW],
    ids=str,
)
def test_kernels_and_arrays_have_one_backward(name: str, dtype: Any) -> None:
    kernels, arrays = KernelOperators(PROFILE, dtype), ArrayOperators(PROFILE, dtype)
    (function, shapes), (expected, _) = cases(kernels)[name], cases(arrays)[name]
    tensors = inputs(name, shapes, dtype)
    output = expected(*tensors)
    assert not differing(function(*tensors), output)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    for mine, theirs in zip(
        gradients(function, tensors, direction), gradients(expected, tensors, direction), strict=True
    ):
        assert mine.any() and not differing(mine, theirs)
