# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Writing the paged key/value cache: `reference.operators.kv_cache.write_cache` as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastpath._tensors import INDEX_TYPES, model_dtype, require_rows
from fastpath.backend import launch, require_fields, require_tensor
from reference.operators.kv_cache import KvCacheContract

#: Elements of one program.
BLOCK = 1024


@triton.jit
def write_cache_kernel(
    keys,
    values,
    slots,
    key_cache,
    value_cache,
    key_stride,
    value_stride,
    cache_slots,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one block of a token's keys and values to its slot."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token).to(tl.int64) + tl.zeros([BLOCK], tl.int64)
    inside = (column < COLUMNS) & (slot >= 0) & (slot < cache_slots)
    key = tl.load(keys + token * key_stride + column, mask=inside)
    value = tl.load(values + token * value_stride + column, mask=inside)
    tl.store(key_cache + slot * COLUMNS + column, key, mask=inside)
    tl.store(value_cache + slot * COLUMNS + column, value, mask=inside)


def write_cache(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    contract: KvCacheContract,
) -> None:
    """Store tokens, in place.

    A slot outside the cache is not written, so that padded batches pass -1. Slots must differ: two tokens with one slot
    race, which a device cannot detect without waiting.

    Args:
        keys, values: bfloat16 or float32 as the contract says, [tokens, KV heads, head_dim]; tokens may be strided.
        slots: int32 or int64, [tokens]: page * page size + offset.
        key_cache, value_cache: [pages, page size, KV heads, head_dim], the same dtype.

    Raises:
        UnsupportedError: fp8 or float16 storage, or another dtype on reading than in storage.
        TypeError, ValueError: dtype, shape, layout or device of an argument.
    """
    dtype = model_dtype(contract, "rounding.storage")
    require_fields(contract, {"rounding.read": str(contract.get("rounding.storage"))})
    require_tensor(key_cache, "key_cache", "pages, page size, KV heads, head_dim", dtype)
    pages, page_size, heads, head_dim = key_cache.shape
    require_tensor(
        value_cache, "value_cache", f"pages={pages}, page={page_size}, heads={heads}, head_dim={head_dim}", dtype
    )
    require_tensor(slots, "slots", "tokens", *INDEX_TYPES)
    shape = f"tokens={slots.shape[0]}, heads={heads}, head_dim={head_dim}"
    require_rows(keys, "keys", shape, dtype)
    require_rows(values, "values", shape, dtype)
    columns = heads * head_dim
    if slots.shape[0] and columns:
        launch(
            write_cache_kernel,
            (slots.shape[0], triton.cdiv(columns, BLOCK)),
            *(keys, values, slots, key_cache, value_cache, keys.stride(0), values.stride(0), pages * page_size),
            contract=contract,
            COLUMNS=columns,
            BLOCK=BLOCK,
        )
