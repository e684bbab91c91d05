"""Read and write a paged KV cache whatever its physical layout.

Backends and instruction sets lay K and V out differently inside a block (transposed, packed in pairs, interleaved).
The layout is not assumed but learned: numbers are stored in a scratch block with the backend's own store operator, and
where each one lands is where the value of that (token, head, feature) lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffcheck.base.errors import EngineError

Tensor = Any
#: ``store(key, value, cache, slots)``: the backend's own operator; key and value are [tokens, heads, head_dim].
Store = Callable[[Tensor, Tensor, Tensor, Tensor], None]

#: Bit pattern of 1.0: the codes are the patterns that follow it, all of them normal numbers, so that a kernel may go
#: through any wider float on the way.
_ONE = {"float32": 0x3F800000, "bfloat16": 0x3F80, "float16": 0x3C00}
#: Codes a pass: 13 bits above 1.0 stay finite in every format.
_BASE = 1 << 13


@dataclass(frozen=True)
class CacheLayout:
    """Where each value of a block lives, as offsets into the cache's storage."""

    block_size: int
    #: Storage elements between two blocks.
    block_stride: int
    #: [2 (K, V), block_size, heads * head_dim] offsets within a block, int64 on the cache's device.
    offsets: Tensor

    def read(self, cache: Tensor, which: int, slots: Tensor) -> Tensor:
        """Values of K (0) or V (1) at flat ``slots`` [rows]: [rows, heads * head_dim]."""
        return _storage(cache)[self._index(which, slots)]

    def write(self, cache: Tensor, which: int, slots: Tensor, values: Tensor) -> None:
        """Put ``values`` [rows, heads * head_dim] at ``slots``."""
        _storage(cache)[self._index(which, slots)] = values

    def _index(self, which: int, slots: Tensor) -> Tensor:
        block = (slots // self.block_size) * self.block_stride
        return block[:, None] + self.offsets[which][slots % self.block_size]


def learn_layout(store: Store, cache: Tensor, blocks: int, heads: int, head_dim: int) -> CacheLayout:
    """Find out how ``store`` lays K and V out in a ``cache`` of ``blocks`` blocks. The cache itself is not touched.

    Raises:
        EngineError: the cache does not hold every value exactly once (quantised, or of a kind not known here).
    """
    import torch

    axes = [axis for axis, size in enumerate(cache.shape) if size == blocks]
    dtype = str(cache.dtype).removeprefix("torch.")
    if len(axes) != 1 or dtype not in _ONE:
        raise EngineError(
            f"KV cache of shape {tuple(cache.shape)} and {dtype}: cannot tell its {blocks} blocks apart",
            "use a kv_cache dtype of 16 or 32 bits, and another number of blocks",
        )
    (axis,) = axes
    scratch = _like_one_block(cache, axis)
    values = scratch.numel()
    size = values // (2 * heads * head_dim)
    slots = torch.arange(size, dtype=torch.int64, device=cache.device)
    codes = torch.arange(values, dtype=torch.int64, device=cache.device)
    found = torch.zeros(values, dtype=torch.int64, device=cache.device)
    place = 1
    while place < values:
        digit = ((codes // place) % _BASE + _ONE[dtype]).to(torch.int32)
        numbers = digit.view(cache.dtype) if dtype == "float32" else digit.to(torch.int16).view(cache.dtype)
        key, value = numbers.view(2, size, heads, head_dim)
        scratch.zero_()
        store(key.contiguous(), value.contiguous(), scratch, slots)
        flat = scratch.reshape(-1)
        bits = flat.view(torch.int32 if dtype == "float32" else torch.int16).to(torch.int64)
        found += (bits - _ONE[dtype]) * place
        place *= _BASE
    where = found.cpu().numpy()
    if not np.array_equal(np.sort(where), np.arange(values)):
        raise EngineError(
            "the KV cache does not hold every stored value exactly once", "use an unquantised KV cache (kv_cache auto)"
        )
    # where[i] is the code found at logical index i of the block; its inverse says where each code lives.
    index = np.unravel_index(np.argsort(where), scratch.shape)
    offsets = sum(i.astype(np.int64) * stride for i, stride in zip(index, cache.stride(), strict=True))
    table = torch.from_numpy(np.asarray(offsets)).to(cache.device)
    return CacheLayout(size, cache.stride(axis), table.view(2, size, heads * head_dim))


def _like_one_block(cache: Tensor, axis: int) -> Tensor:
    """A cache of one block with the same order of axes in memory."""
    shape = [1 if i == axis else n for i, n in enumerate(cache.shape)]
    order = sorted(range(cache.ndim), key=lambda i: (-cache.stride(i), i))
    inverse = [order.index(i) for i in range(cache.ndim)]
    return cache.new_zeros([shape[i] for i in order]).permute(inverse)


def _storage(cache: Tensor) -> Tensor:
    """The cache's memory as a vector that starts at its first element."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    return cache.as_strided((span,), (1,))
