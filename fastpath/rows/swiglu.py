# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""SwiGLU: `reference.operators.swiglu` as Triton kernels, forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath._tensors import TRITON_TYPES, accepted, require_rows
from fastpath.backend import launch, require_tensor
from fastpath.primitives import (
    EXP_OVERFLOW,
    INFINITY,
    LOG2_E,
    MINUS_LN2_HIGH,
    MINUS_LN2_LOW,
    TO_INTEGER,
    bits,
    div_rn,
    exp_polynomial,
    from_bits,
    narrow,
    widen,
)
from reference.gradients import SwigluBackwardContract
from reference.operators.swiglu import SwigluContract

IMPLEMENTED = (("rounding.silu", "float32"), ("primitives.silu", "rlk"))
IMPLEMENTED_GRADIENT = (("order.gate", "(dy*up)*slope"), ("primitives.exp", "rlk"))
#: Features of one program: 32 bytes a thread in four warps.
BLOCK = 2048


@triton.jit
def denominator(g):
    """1 + e^-g, to the bit as with the primitive `exp`, in 10 fewer operations; any value for NaN.

    Below e^-80 the sum is 1 whatever the exponential: no subnormal is needed, and an addition to the exponent scales.
    """
    x = 0.0 - g
    reduced = tl.minimum(tl.maximum(x, -80.0), EXP_OVERFLOW)
    shifted = tl.fma(reduced, LOG2_E, TO_INTEGER)
    k = shifted - TO_INTEGER
    r = tl.fma(k, MINUS_LN2_LOW, tl.fma(k, MINUS_LN2_HIGH, reduced))
    exponential = from_bits((bits(shifted) << 23) + bits(exp_polynomial(r)))
    return 1.0 + tl.where(x >= EXP_OVERFLOW, INFINITY, exponential)


@triton.jit
def swiglu_kernel(
    gate, up, output, gate_stride, up_stride, FEATURES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """output[t] = silu(gate[t]) * up[t] on one block of features."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < FEATURES
    g = widen(tl.load(gate + row * gate_stride + feature, mask=inside, other=0.0))
    u = widen(tl.load(up + row * up_stride + feature, mask=inside, other=0.0))
    activated = div_rn(g, denominator(g))
    tl.store(output + row * FEATURES + feature, narrow(activated * u, DTYPE), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    grad_output,
    gate,
    up,
    grad_gate,
    grad_up,
    gate_stride,
    up_stride,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Gradients of one block of features."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < FEATURES
    dy = widen(tl.load(grad_output + row * FEATURES + feature, mask=inside, other=0.0))
    g = widen(tl.load(gate + row * gate_stride + feature, mask=inside, other=0.0))
    u = widen(tl.load(up + row * up_stride + feature, mask=inside, other=0.0))
    below = denominator(g)
    s = div_rn(1.0, below)
    slope = s * tl.fma(g, 1.0 - s, 1.0)
    tl.store(grad_up + row * FEATURES + feature, narrow(dy * div_rn(g, below), DTYPE), mask=inside)
    tl.store(grad_gate + row * FEATURES + feature, narrow((dy * u) * slope, DTYPE), mask=inside)


def swiglu(gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract) -> torch.Tensor:
    """The gated activation.

    Args:
        gate, up: bfloat16 or float32 as the contract says, [tokens, features]; rows may be strided (two halves of one
            projection).

    Returns:
        [tokens, features], contiguous, the same dtype.

    Raises:
        UnsupportedError: a contract field or format without kernel.
        TypeError, ValueError: dtype, shape, layout or device of an argument.
    """
    dtype = accepted(contract, IMPLEMENTED)
    require_rows(gate, "gate", "tokens, features", dtype)
    tokens, features = gate.shape
    require_rows(up, "up", f"tokens={tokens}, features={features}", dtype)
    output = torch.empty(tokens, features, dtype=dtype, device=gate.device)
    if output.numel():
        launch(
            swiglu_kernel,
            (tokens, triton.cdiv(features, BLOCK)),
            *(gate, up, output, gate.stride(0), up.stride(0)),
            contract=contract,
            FEATURES=features,
            BLOCK=BLOCK,
            DTYPE=TRITON_TYPES[dtype],
        )
    return output


def swiglu_backward(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, contract: SwigluBackwardContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``gate`` and ``up``, each rounded once: `reference.gradients.swiglu`.

    Args:
        grad_output, gate, up: [tokens, features], as in :func:`swiglu`.

    Raises:
        As :func:`swiglu`.
    """
    dtype = accepted(contract, IMPLEMENTED_GRADIENT, "rounding.input")
    require_tensor(grad_output, "grad_output", "tokens, features", dtype)
    tokens, features = grad_output.shape
    require_rows(gate, "gate", f"tokens={tokens}, features={features}", dtype)
    require_rows(up, "up", f"tokens={tokens}, features={features}", dtype)
    grad_gate, grad_up = torch.empty_like(grad_output), torch.empty_like(grad_output)
    if grad_output.numel():
        launch(
            swiglu_backward_kernel,
            (tokens, triton.cdiv(features, BLOCK)),
            *(grad_output, gate, up, grad_gate, grad_up, gate.stride(0), up.stride(0)),
            contract=contract,
            FEATURES=features,
            BLOCK=BLOCK,
            DTYPE=TRITON_TYPES[dtype],
        )
    return grad_gate, grad_up
