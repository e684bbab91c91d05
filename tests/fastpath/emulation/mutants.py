# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
"""Small kernels, and of each a mutation that changes bits (``MUTATED``). What must catch it: test_mutations.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fastpath.primitives import (
    EXP_2,
    EXP_3,
    EXP_4,
    EXP_5,
    EXP_6,
    LOG2_E,
    MINUS_LN2_HIGH,
    MINUS_LN2_LOW,
    TO_INTEGER,
    TO_INTEGER_BITS,
    bits,
    div_rn,
    from_bits,
    pairs_tree,
    round_bf16,
    rsqrt,
    scale_by_power_of_two,
    sqrt_rn,
)

NEXT_EXP_2 = tl.constexpr(float.fromhex("0x1.fffffep-2"))


@triton.jit
def multiply_add(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """x * x + 1; mutated: one FMA."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    v = tl.fma(v, v, 1.0) if MUTATED else v * v + 1.0
    tl.store(out + i, v, mask=i < n)


@triton.jit
def exponential(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """e^x for moderate x; mutated: a coefficient is the next float32."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    shifted = tl.fma(v, LOG2_E, TO_INTEGER)
    k = shifted - TO_INTEGER
    r = tl.fma(k, MINUS_LN2_LOW, tl.fma(k, MINUS_LN2_HIGH, v))
    p = tl.fma(r, EXP_6, EXP_5)
    p = tl.fma(p, r, EXP_4)
    p = tl.fma(p, r, EXP_3)
    p = tl.fma(p, r, NEXT_EXP_2 if MUTATED else EXP_2)
    p = tl.fma(tl.fma(p, r, 1.0), r, 1.0)
    tl.store(out + i, scale_by_power_of_two(p, bits(shifted) - TO_INTEGER_BITS), mask=i < n)


@triton.jit
def inverse_root(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """1 / sqrt(x); mutated: without the compensated step."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=1.0)
    v = div_rn(1.0, sqrt_rn(v)) if MUTATED else rsqrt(v)
    tl.store(out + i, v, mask=i < n)


@triton.jit
def row_sum(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """Sum of a row by adjacent pairs; mutated: Triton's own order."""
    row = tl.program_id(0)
    v = tl.load(x + row * BLOCK + tl.arange(0, BLOCK))
    total = tl.sum(v, axis=0) if MUTATED else tl.sum(pairs_tree(tl.reshape(v, [1, BLOCK]), 1, BLOCK), axis=0)
    tl.store(out + row, total)


@triton.jit
def to_bfloat16(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """float32 to bfloat16 to nearest even; mutated: toward zero."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    v = from_bits(bits(v) & -65536) if MUTATED else round_bf16(v).to(tl.float32)
    tl.store(out + i, v, mask=i < n)


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """x; mutated: the mask leaves the last element out."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n - 1 if MUTATED else i < n
    tl.store(out + i, tl.load(x + i, mask=mask), mask=mask)


@triton.jit
def chain(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """total = fma(x, x, total) over the rows of [n, BLOCK], ascending; mutated: descending."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(0, n):
        row = n - 1 - k if MUTATED else k
        v = tl.load(x + row * BLOCK + i)
        total = tl.fma(v, v, total)
    tl.store(out + i, total)


@triton.jit
def sum_of_rows(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """Row sums by pairs; mutated: every element added to its row by an atomic."""
    row = tl.program_id(0)
    v = tl.load(x + row * BLOCK + tl.arange(0, BLOCK))
    if MUTATED:
        tl.atomic_add(out + row + tl.zeros([BLOCK], tl.int32), v)
    else:
        tl.store(out + row, tl.sum(pairs_tree(tl.reshape(v, [1, BLOCK]), 1, BLOCK), axis=0))


@triton.jit
def reciprocal(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """1 / x; mutated: the estimate that integer divisions begin with."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=1.0)
    if MUTATED:
        v = tl.inline_asm_elementwise("v_rcp_iflag_f32 $0, $1", "=v,v", [v], tl.float32, True, 1)
    else:
        v = div_rn(1.0, v)
    tl.store(out + i, v, mask=i < n)


@triton.jit
def half_exponential(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """x; mutated: through the hardware's exponential of float16."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    if MUTATED:
        v = tl.inline_asm_elementwise("v_exp_f16 $0, $1", "=v,v", [v], tl.float32, True, 1)
    tl.store(out + i, v, mask=i < n)


@triton.jit
def beside_division(x, out, n, BLOCK: tl.constexpr, MUTATED: tl.constexpr):
    """x * x + 1, its place found by a division of 64-bit integers; mutated: compiled with contraction."""
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    wide = n.to(tl.int64)
    row = i // wide
    v = tl.load(x + row * wide + i % wide, mask=i < wide)
    tl.store(out + i, v * v + 1.0, mask=i < wide)
