# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
"""Kernels that each break one rule of fastpath.compiled: options and functions that the fast path must not use."""

from __future__ import annotations

import triton
import triton.language as tl

from fastpath.primitives import div_rn


@triton.jit
def multiply_then_add(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(y + i, v * v + 1.0)


@triton.jit
def hardware_function(x, y, BLOCK: tl.constexpr, NAME: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    if NAME == "exp":
        v = tl.exp(v)
    elif NAME == "exp2":
        v = tl.exp2(v)
    elif NAME == "log":
        v = tl.log(v)
    elif NAME == "rsqrt":
        v = tl.rsqrt(v)
    elif NAME == "sqrt":
        v = tl.sqrt(v)
    elif NAME == "sigmoid":
        v = tl.sigmoid(v)
    elif NAME == "div_rn":
        v = div_rn(1.0, v)
    else:
        v = tl.math.div_rn(1.0, v)
    tl.store(y + i, v)


@triton.jit
def product(a, b, c, SIZE: tl.constexpr, WIDEN: tl.constexpr):
    i = tl.arange(0, SIZE)
    left = tl.load(a + i[:, None] * SIZE + i[None, :])
    right = tl.load(b + i[:, None] * SIZE + i[None, :])
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    tl.store(c + i[:, None] * SIZE + i[None, :], tl.dot(left, right, input_precision="ieee"))


@triton.jit
def too_many_values(x, y, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, BLOCK)
    kept = ()
    total = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(COUNT):
        v = tl.load(x + n * BLOCK + i)
        kept = kept + (v,)  # noqa: RUF005 - what Triton parses
        total = tl.fma(v, v, total)
    for n in tl.static_range(COUNT):
        tl.store(y + n * BLOCK + i, kept[n] + total)
