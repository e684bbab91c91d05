"""The paged cache is read and written through a learned layout, whatever it is: no engine needed, only tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from diffcheck.base.errors import EngineError  # noqa: E402
from diffcheck.capture.vllm.cache import learn_layout  # noqa: E402

BLOCKS, SIZE, HEADS, DIM = 5, 8, 3, 4


def flash(key: Any, value: Any, cache: Any, slots: Any) -> None:
    """[2, blocks, tokens, heads, dim], plain."""
    for which, x in enumerate((key, value)):
        cache[which, slots // SIZE, slots % SIZE] = x


def head_major(key: Any, value: Any, cache: Any, slots: Any) -> None:
    """[blocks, heads, tokens, 2 * dim]: K and V side by side."""
    cache[slots // SIZE, :, slots % SIZE, :DIM] = key
    cache[slots // SIZE, :, slots % SIZE, DIM:] = value


def transposed_pairs(key: Any, value: Any, cache: Any, slots: Any) -> None:
    """[blocks, heads, 2 * tokens, dim], where the first half holds K as pairs of features of one token after another,
    and the second V with the tokens of a feature next to each other.
    """
    area = SIZE * DIM
    flat = cache.view(cache.shape[0], HEADS, 2 * area)
    for slot, k, v in zip(slots.tolist(), key, value, strict=True):
        block, token = divmod(slot, SIZE)
        for d in range(DIM):
            flat[block, :, (d // 2) * 2 * SIZE + token * 2 + d % 2] = k[:, d]
            flat[block, :, area + d * SIZE + token] = v[:, d]


LAYOUTS = {
    "flash": (flash, (2, BLOCKS, SIZE, HEADS, DIM)),
    "head_major": (head_major, (BLOCKS, HEADS, SIZE, 2 * DIM)),
    "transposed_pairs": (transposed_pairs, (BLOCKS, HEADS, 2 * SIZE, DIM)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("store", "shape"), LAYOUTS.values(), ids=LAYOUTS)
def test_values_are_found_where_the_store_put_them(store: Any, shape: tuple[int, ...], dtype: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(shape, generator=generator).to(dtype)
    before = cache.clone()
    layout = learn_layout(store, cache, BLOCKS, HEADS, DIM)
    assert layout.block_size == SIZE and torch.equal(cache, before)
    slots = torch.tensor([0, 39, 17, 8, 23])
    key, value = torch.randn((2, 5, HEADS, DIM), generator=generator).to(dtype)
    store(key, value, cache, slots)
    assert torch.equal(layout.read(cache, 0, slots), key.flatten(1))
    assert torch.equal(layout.read(cache, 1, slots), value.flatten(1))
    written = cache.clone()
    layout.write(written, 1, slots[1:2], -value[1:2].flatten(1))
    value[1] *= -1
    store(key, value, cache, slots)
    assert torch.equal(written, cache)


def test_a_cache_with_permuted_memory_is_followed() -> None:
    """Heads before tokens in memory, tokens before heads in the view."""
    cache = torch.zeros(2, BLOCKS, HEADS, SIZE, DIM).transpose(2, 3)
    layout = learn_layout(flash, cache, BLOCKS, HEADS, DIM)
    key, value = torch.randn(2, 3, HEADS, DIM)
    slots = torch.tensor([1, 9, 38])
    flash(key, value, cache, slots)
    assert torch.equal(layout.read(cache, 0, slots), key.flatten(1))
    assert torch.equal(layout.read(cache, 1, slots), value.flatten(1))


def test_large_blocks_need_more_codes_than_one_pass_has() -> None:
    def store(key: Any, value: Any, cache: Any, slots: Any) -> None:
        cache[0, :, slots] = torch.stack([key[:, 0], value[:, 0]])

    cache = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    assert learn_layout(store, cache, 1, 1, 64).block_size == 128


def _lossy(key: Any, value: Any, cache: Any, slots: Any) -> None:
    flash(key.to(torch.float8_e5m2).to(key.dtype), value, cache, slots)


def _forgetful(key: Any, value: Any, cache: Any, slots: Any) -> None:
    flash(key, key, cache, slots)


@pytest.mark.parametrize("store", [_lossy, _forgetful])
def test_a_cache_that_does_not_hold_the_values_is_refused(store: Callable[..., None]) -> None:
    cache = torch.zeros(2, BLOCKS, SIZE, HEADS, DIM, dtype=torch.bfloat16)
    with pytest.raises(EngineError, match="exactly once"):
        learn_layout(store, cache, BLOCKS, HEADS, DIM)


def test_blocks_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(EngineError, match="cannot tell its 3 blocks apart"):
        learn_layout(flash, torch.zeros(2, 3, SIZE, 3, DIM), 3, 3, DIM)
    with pytest.raises(EngineError, match="float8"):
        learn_layout(flash, torch.zeros(2, 3, SIZE, 4, DIM, dtype=torch.float8_e4m3fn), 3, 4, DIM)
