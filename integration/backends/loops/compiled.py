"""The loops of the `strict-v1/fma32-seq` contracts on arrays that were checked and allocated before.

Every addition and multiplication is written in its order, `fma` is one LLVM instruction with one rounding, and no
fast-math flag is set, so that vector instructions can only run independent elements side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from reference.checks import Float32Array


def _hide_private_names() -> None:
    """Make llvmlite's proxy of its library deny having a ``__dict__``.

    It answers every name, and vLLM, which looks through the attributes of all loaded modules, trips over the answer.
    It cannot be told to leave a module out, and numba loads llvmlite whenever a loop is compiled: so here, not in vLLM.
    """
    from llvmlite.binding import ffi

    proxy, answer = ffi._lib_wrapper, ffi._lib_wrapper.__getattr__

    def get(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    proxy.__getattr__ = get


_hide_private_names()
_F = np.float32
ZERO, ONE, HALF, NEVER = _F(0), _F(1), _F(0.5), _F(-np.inf)
TO_INTEGER, FLOOR = _F(float.fromhex("0x1.8p23")), _F(-127)
E0, E1, E2, E3, E4, E5 = (
    _F(float.fromhex(c))
    for c in ("0x1.416b52p-13", "0x1.5f082ep-10", "0x1.3b2de0p-7", "0x1.c6af7cp-5", "0x1.ebfbdcp-3", "0x1.62e430p-1")
)
LOG2_E, LN2_HIGH, LN2_LOW, X0, X1, X2, X3, X4, LARGEST, SMALLEST = (
    _F(float.fromhex(c))
    for c in (
        "0x1.715476p0",
        "-0x1.62e400p-1",
        "-0x1.7f7d1cp-20",
        "0x1.6a4d60p-10",
        "0x1.12398ep-7",
        "0x1.5558b0p-5",
        "0x1.555492p-3",
        "0x1.fffffcp-2",
        "0x1.62e430p6",
        "-0x1.9fe36ap6",
    )
)
BLOCK = 64
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def _compile(kernel: _Kernel) -> _Kernel:
    """Compiled at its first call, and kept on disk."""
    compiled: _Kernel = njit(cache=True, nogil=True, error_model="numpy")(kernel)
    return compiled


@intrinsic  # type: ignore[untyped-decorator]
def fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding, float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def as_float(_context: Any, pattern: Any) -> Any:
    """The float32 with an int32 bit pattern."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.float32(types.int32), generate


#: Elements of K and of N that stay in the cache while all rows go over them.
CHAIN_K, CHAIN_N = 256, 512


@_compile
def chain_on(a: Float32Array, b: Float32Array, out: Float32Array) -> None:
    """out += a^T b: every element's chain goes on, one FMA per k, ascending; a [K, M], b [K, N], out [M, N].

    Blocks only change when a step of a chain is made. Two rows take four steps at a time, so that most operands come
    from registers.
    """
    size, rows = a.shape
    columns = b.shape[1]
    for k0 in range(0, size, CHAIN_K):
        k1 = min(k0 + CHAIN_K, size)
        for n0 in range(0, columns, CHAIN_N):
            n1 = min(n0 + CHAIN_N, columns)
            for m in range(0, rows - 1, 2):
                above, below = out[m, n0:n1], out[m + 1, n0:n1]
                k = k0
                while k + 4 <= k1:
                    b0, b1, b2, b3 = b[k, n0:n1], b[k + 1, n0:n1], b[k + 2, n0:n1], b[k + 3, n0:n1]
                    p0, p1, p2, p3 = a[k, m], a[k + 1, m], a[k + 2, m], a[k + 3, m]
                    q0, q1, q2, q3 = a[k, m + 1], a[k + 1, m + 1], a[k + 2, m + 1], a[k + 3, m + 1]
                    for n in range(n1 - n0):
                        w0, w1, w2, w3 = b0[n], b1[n], b2[n], b3[n]
                        above[n] = fma(p3, w3, fma(p2, w2, fma(p1, w1, fma(p0, w0, above[n]))))
                        below[n] = fma(q3, w3, fma(q2, w2, fma(q1, w1, fma(q0, w0, below[n]))))
                    k += 4
                while k < k1:
                    b0, p0, q0 = b[k, n0:n1], a[k, m], a[k, m + 1]
                    for n in range(n1 - n0):
                        above[n] = fma(p0, b0[n], above[n])
                        below[n] = fma(q0, b0[n], below[n])
                    k += 1
            if rows % 2:
                above = out[rows - 1, n0:n1]
                k = k0
                while k + 4 <= k1:
                    b0, b1, b2, b3 = b[k, n0:n1], b[k + 1, n0:n1], b[k + 2, n0:n1], b[k + 3, n0:n1]
                    p0, p1, p2, p3 = a[k, rows - 1], a[k + 1, rows - 1], a[k + 2, rows - 1], a[k + 3, rows - 1]
                    for n in range(n1 - n0):
                        above[n] = fma(p3, b3[n], fma(p2, b2[n], fma(p1, b1[n], fma(p0, b0[n], above[n]))))
                    k += 4
                while k < k1:
                    b0, p0 = b[k, n0:n1], a[k, rows - 1]
                    for n in range(n1 - n0):
                        above[n] = fma(p0, b0[n], above[n])
                    k += 1


@_compile
def round_bfloat16(x: Float32Array) -> None:
    """Round a contiguous array in place to nearest even; NaN becomes the quiet NaN."""
    bits = x.reshape(-1).view(np.uint32)
    for i in range(bits.size):
        u = bits[i]
        if (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            bits[i] = np.uint32(0x7FC00000)
        else:
            bits[i] = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)


@_compile
def exp2_nonpositive(x: Any, bits: NDArray[np.uint32], place: NDArray[np.float32]) -> Any:
    """2^x for x <= 0; ``bits`` and ``place`` are one element seen as integer and as float."""
    if x != x:
        return x
    reduced = max(x, FLOOR)
    if reduced == FLOOR:
        return ZERO
    shifted = reduced + TO_INTEGER
    f = reduced - (shifted - TO_INTEGER)
    p = fma(E0, f, E1)
    p = fma(p, f, E2)
    p = fma(p, f, E3)
    p = fma(p, f, E4)
    p = fma(p, f, E5)
    p = fma(p, f, ONE)
    place[0] = shifted
    high = bits[0] << np.uint32(23)
    place[0] = p
    bits[0] = high + bits[0]
    return place[0]


@_compile
def exp(x: Any, bits: NDArray[np.int32], place: NDArray[np.float32]) -> Any:
    """e^x; ``bits`` and ``place`` are one element seen as integer and as float."""
    if x != x:
        return x
    if x > LARGEST:
        return -NEVER
    if x < SMALLEST:
        return ZERO
    k = fma(x, LOG2_E, TO_INTEGER) - TO_INTEGER
    r = fma(k, LN2_LOW, fma(k, LN2_HIGH, x))
    p = fma(X0, r, X1)
    p = fma(p, r, X2)
    p = fma(p, r, X3)
    p = fma(p, r, X4)
    p = fma(fma(p, r, ONE), r, ONE)
    n = np.int32(k)
    half = n >> np.int32(1)
    bits[0] = (half + np.int32(127)) << np.int32(23)
    p = p * place[0]
    bits[0] = (n - half + np.int32(127)) << np.int32(23)
    return p * place[0]


@_compile
def exponentials(x: Float32Array, out: Float32Array) -> None:
    """e^x of vectors."""
    place = np.empty(1, np.float32)
    bits = place.view(np.int32)
    for i in range(x.size):
        out[i] = exp(x[i], bits, place)


@_compile
def gated(gate: Float32Array, up: Float32Array, out: Float32Array) -> None:
    """gate / (1 + e^-gate) * up of vectors."""
    place = np.empty(1, np.float32)
    bits = place.view(np.int32)
    for i in range(gate.size):
        out[i] = gate[i] / (ONE + exp(-gate[i], bits, place)) * up[i]


@_compile
def attend(
    q: Float32Array,
    positions: NDArray[np.int64],
    keys: Float32Array,
    values: Float32Array,
    scale: Any,
    narrow: bool,
    out: Float32Array,
    maxima: Float32Array,
    totals: Float32Array,
) -> None:
    """Causal attention of one sequence: q [tokens, heads, d], keys and values [length, KV heads, d], out like q.

    ``scale`` is fp32(log2(e) / sqrt(d)); ``narrow`` rounds probabilities to bfloat16. The output is not rounded.
    ``maxima`` and ``totals`` [tokens, heads]: largest scaled score and row sum.
    """
    tokens, heads, dim = q.shape
    group = heads // keys.shape[1]
    p, place = np.empty(BLOCK, np.float32), np.empty(1, np.float32)
    rounded, bits = np.empty(BLOCK, np.float32), place.view(np.uint32)
    for t in range(tokens):
        visible = positions[t] + 1
        for h in range(heads):
            g = h // group
            row, acc = q[t, h], out[t, h]
            acc[:] = ZERO
            maximum, total = NEVER, ZERO
            for start in range(0, visible, BLOCK):
                count = min(BLOCK, visible - start)
                top = maximum
                for j in range(count):
                    key, s = keys[start + j, g], ZERO
                    for d in range(dim):
                        s = fma(row[d], key[d], s)
                    s = s * scale
                    p[j] = s
                    if s > top or s != s:
                        top = s
                if top != top:  # NaN wins over whatever came after it
                    top = _F(np.nan)
                alpha = exp2_nonpositive(ZERO if maximum == top else maximum - top, bits, place)
                for j in range(count):
                    p[j] = exp2_nonpositive(p[j] - top, bits, place)
                for j in range(count, BLOCK):
                    p[j] = ZERO
                rounded[:] = p
                width = BLOCK
                while width > 1:
                    width //= 2
                    for j in range(width):
                        p[j] = p[2 * j] + p[2 * j + 1]
                total = fma(total, alpha, p[0])
                maximum = top
                if narrow:
                    round_bfloat16(rounded)
                for d in range(dim):
                    acc[d] = acc[d] * alpha
                for j in range(count):
                    value, weight = values[start + j, g], rounded[j]
                    for d in range(dim):
                        acc[d] = fma(weight, value[d], acc[d])
            maxima[t, h], totals[t, h] = maximum, total
            for d in range(dim):
                acc[d] = acc[d] / total + ZERO


@_compile
def gather(
    cache: NDArray[Any], blocks: NDArray[np.int64], start: int, keys: NDArray[Any], values: NDArray[Any]
) -> None:
    """Tokens from ``start`` on of one sequence, as bit patterns.

    cache [blocks, KV heads, block size, 2 d] of uint16 (bfloat16) or uint32 (float32); keys and values
    [tokens, KV heads, d] of uint32 patterns of float32.
    """
    size, dim = cache.shape[2], keys.shape[2]
    shift = np.uint32(32 - 8 * cache.itemsize)
    for t in range(keys.shape[0]):
        block, slot = blocks[(start + t) // size], (start + t) % size
        for h in range(keys.shape[1]):
            for d in range(dim):
                keys[t, h, d] = np.uint32(cache[block, h, slot, d]) << shift
                values[t, h, d] = np.uint32(cache[block, h, slot, dim + d]) << shift


@_compile
def rotate(x: Float32Array, cos: Float32Array, sin: Float32Array, out: Float32Array) -> None:
    """RoPE of x [tokens, heads, d] by tables [tokens, d / 2]; feature i pairs with i + d / 2."""
    half = x.shape[2] // 2
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i in range(half):
                a, b = x[t, h, i], x[t, h, half + i]
                out[t, h, i] = fma(a, cos[t, i], -b * sin[t, i])
                out[t, h, half + i] = fma(b, cos[t, i], a * sin[t, i])


@_compile
def normalise(x: Float32Array, weight: Float32Array, epsilon: Any, out: Float32Array) -> None:
    """RMSNorm of the rows of x [rows, n]: squares in 256 lanes, a tree over lanes, a compensated reciprocal root."""
    n = x.shape[1]
    lanes = 256
    while lanes > n:
        lanes //= 2
    acc = np.empty(lanes, np.float32)
    for i in range(x.shape[0]):
        row = x[i]
        acc[:] = ZERO
        for first in range(0, n, lanes):
            for j in range(min(lanes, n - first)):
                acc[j] = fma(row[first + j], row[first + j], acc[j])
        width = lanes
        while width > 1:
            width //= 2
            for j in range(width):
                acc[j] = acc[2 * j] + acc[2 * j + 1]
        v = acc[0] / _F(n) + epsilon
        r = ONE / np.sqrt(v)
        if np.isfinite(v) and v != ZERO:
            high = v * r
            low = fma(v, r, -high)
            r = fma(HALF * r, fma(-low, r, fma(-high, r, ONE)), r)
        for j in range(n):
            out[i, j] = row[j] * r * weight[j]
