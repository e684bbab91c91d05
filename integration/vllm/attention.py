"""Paged attention as a vLLM backend: keys and values lie in vLLM's blocks, the arithmetic is the reference's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.attention.backend import AttentionImpl, AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from integration.backends.arrays import ArrayOperators
from integration.vllm.state import operators
from reference.checks import Float32Array

Tensor = Any


def _operators(dtype: Any) -> ArrayOperators:
    own = operators(dtype)
    assert isinstance(own, ArrayOperators)  # vLLM chose its CPU backend, so its device is the CPU
    return own


@dataclass(frozen=True)
class Sequence:
    """One request's part of a step."""

    #: Rows of the step's tensors.
    rows: slice
    #: Position of each row's token.
    positions: NDArray[np.int64]
    #: Tokens in the cache, this step's included.
    length: int
    #: Its blocks, in order.
    blocks: NDArray[np.int64]


@dataclass
class StrictMetadata(CPUAttentionMetadata):  # type: ignore[misc]
    """vLLM's metadata of a step, and the same by sequence."""

    sequences: list[Sequence] = field(default_factory=list)


class StrictMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Reads a step's metadata once for all layers."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StrictMetadata:
        m = common_attn_metadata
        if m.causal is not True:
            raise TypeError("attention without a causal mask has no strict contract")
        starts, lengths = m.query_start_loc.tolist(), m.seq_lens.tolist()
        tables = m.block_table_tensor.numpy().astype(np.int64)
        sequences = []
        for r, length in enumerate(lengths[: m.num_reqs]):
            count = starts[r + 1] - starts[r]
            if count:
                blocks = tables[r, : -(-length // self.block_size)]
                rows = slice(starts[r], starts[r + 1])
                sequences.append(Sequence(rows, np.arange(length - count, length), length, blocks))
        return StrictMetadata(
            num_actual_tokens=m.num_actual_tokens,
            max_query_len=m.max_query_len,
            query_start_loc=m.query_start_loc,
            max_seq_len=m.max_seq_len,
            seq_lens=m.seq_lens,
            block_table=m.block_table_tensor,
            slot_mapping=m.slot_mapping,
            scheduler_metadata=None,
            causal=True,
            sequences=sequences,
        )


@dataclass(frozen=True)
class BlockReader:
    """Keys and values of one sequence in a cache [blocks, KV heads, block size, 2 * head_dim]."""

    own: ArrayOperators
    cache: Tensor
    blocks: NDArray[np.int64]
    length: int

    def read(self, start: int, stop: int) -> tuple[Float32Array, Float32Array]:
        return self.own.read_blocks(self.cache, self.blocks, start, stop)


class StrictAttentionImpl(AttentionImpl):  # type: ignore[misc]
    """One layer's attention. Arguments as vLLM passes them."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        foreign = {
            "alibi_slopes": alibi_slopes is not None,
            "kv_cache_dtype": kv_cache_dtype not in ("auto", "bfloat16", "float16", "float32"),
            "logits_soft_cap": bool(logits_soft_cap),
            "attn_type": attn_type != AttentionType.DECODER,
            "kv_sharing": kv_sharing_target_layer_name is not None,
            "sinks": sinks is not None,
        }
        if any(foreign.values()):
            named = ", ".join(name for name, present in foreign.items() if present)
            raise TypeError(f"attention with {named} has no strict path yet")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        #: Newest keys that a query sees; vLLM reads it from every CPU attention layer, -1 for all.
        self.sliding_window = -1 if sliding_window is None else int(sliding_window)
        # head_dim ** -0.5 and 1 / sqrt(head_dim) may differ in their last bit; the contract means the latter.
        self._scale = None if scale == head_size**-0.5 else float(scale)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store ``key`` and ``value`` [tokens, KV heads, head_dim] at flat slots; a negative slot is padding."""
        own, size = _operators(key.dtype), kv_cache.shape[2]
        count = slot_mapping.shape[0]
        both = torch.cat([own.kv_cache(key[:count]), own.kv_cache(value[:count])], dim=-1)
        slots = slot_mapping.long()
        if bool((slots < 0).any()):
            both, slots = both[slots >= 0], slots[slots >= 0]
        kv_cache[slots // size, :, slots % size] = both

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StrictMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """``query`` [tokens, heads, head_dim] over the cache, into ``output``."""
        if output_scale is not None or output_block_scale is not None:
            raise TypeError("quantised attention outputs have no strict contract")
        if attn_metadata is None:  # warming up: there is no cache yet
            return output
        own = _operators(query.dtype)
        window = None if self.sliding_window < 0 else self.sliding_window
        for part in attn_metadata.sequences:
            kv = BlockReader(own, kv_cache, part.blocks, part.length)
            attended = own.attention(query[part.rows], part.positions, kv, self._scale, window)
            output[part.rows] = attended.reshape(output[part.rows].shape)
        return output


class StrictAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Takes the place of vLLM's CPU backend."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[StrictAttentionImpl]:
        return StrictAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[StrictMetadataBuilder]:
        return StrictMetadataBuilder
