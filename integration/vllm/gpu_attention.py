"""Paged attention as a vLLM backend on a GPU: vLLM's blocks, its scheduler's metadata, our kernels.

Nothing here waits for the device, so that a decode step can be captured whole. The metadata are vLLM's own persistent
buffers: a replayed graph reads what the scheduler wrote there last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from integration.backends.kernels import KernelOperators
from integration.vllm.state import operators

Tensor = Any


@dataclass
class StrictMetadata:
    """What the kernels need of a step."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


class StrictMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Hands on what the scheduler made."""

    # Decode steps of one token a sequence are captured whole; the grid of any other depends on its longest query.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StrictMetadata:
        metadata = self.build(0, common_attn_metadata)
        # the longest model length would make every captured launch walk all blocks
        metadata.seq_lens.fill_(1)
        return metadata

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StrictMetadata:
        m = common_attn_metadata
        if m.causal is not True:
            raise TypeError("attention without a causal mask has no strict contract")
        if common_prefix_len:
            raise TypeError("cascade attention has no strict contract")
        return StrictMetadata(
            m.num_actual_tokens, m.max_query_len, m.query_start_loc, m.seq_lens, m.block_table_tensor, m.slot_mapping
        )


def _operators(dtype: Any) -> KernelOperators:
    own = operators(dtype)
    assert isinstance(own, KernelOperators)  # vLLM chose a GPU backend, so its device is a GPU
    return own


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
        **extra: Any,
    ) -> None:
        foreign = {
            "alibi_slopes": alibi_slopes is not None,
            "sliding_window": sliding_window is not None,
            "kv_cache_dtype": kv_cache_dtype not in ("auto", "bfloat16", "float32"),
            "logits_soft_cap": bool(logits_soft_cap),
            "attn_type": attn_type != AttentionType.DECODER,
            "kv_sharing": kv_sharing_target_layer_name is not None,
            **{name: value is not None for name, value in extra.items()},
        }
        if any(foreign.values()):
            named = ", ".join(name for name, present in foreign.items() if present)
            raise TypeError(f"attention with {named} has no strict path yet")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        # head_dim ** -0.5 and 1 / sqrt(head_dim) may differ in their last bit; the contract means the latter.
        self._scale = None if scale == head_size**-0.5 else float(scale)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store ``key`` and ``value`` [tokens, KV heads, head_dim] at flat slots; a negative slot is padding."""
        _operators(key.dtype).write_cache(key, value, kv_cache, slot_mapping)

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
        if attn_metadata is None:  # the profile run: there is no cache yet
            return output.zero_()
        m = attn_metadata
        _operators(query.dtype).paged_attention(
            query, m.query_start_loc, m.max_query_len, kv_cache, m.block_table, m.seq_lens, self._scale, output
        )
        return output


class StrictAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Takes the place of every attention backend that vLLM may choose on a GPU."""

    import torch

    supported_dtypes: ClassVar[list[Any]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[StrictAttentionImpl]:
        return StrictAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[StrictMetadataBuilder]:
        return StrictMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if include_num_layers_dimension:
            raise NotImplementedError
        return (0, 1, 2, 3, 4)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in (16, 32, 64, 128, 256)

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False


#: vLLM's GPU backends that ours stands in for, whichever it would choose.
REPLACED = (
    "FLASH_ATTN",
    "TRITON_ATTN",
    "FLASHINFER",
    "FLEX_ATTENTION",
    "ROCM_ATTN",
    "ROCM_AITER_FA",
    "ROCM_AITER_UNIFIED_ATTN",
    "CUSTOM",
)
