"""The paged key/value cache: what is stored, with which scale, and how it is read back through a block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from reference.checks import Float32Array
from reference.contract.base import Contract, Group, choice, format_choice
from reference.operators._arguments import float_array, index_array, positive, same_shape
from reference.operators._numerics import narrow, quiet

FP8_FORMATS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")


@dataclass(frozen=True)
class Rounding(Group):
    storage: str = choice(("bfloat16", "float16", "float32", *FP8_FORMATS), "stores keys and values in {value}")
    overflow: str = choice(
        ("saturate", "nan"),
        {
            "saturate": "stores the largest finite fp8 value for what is too large",
            "nan": "stores NaN for what is too large for fp8",
        },
        equivalent="values inside the range of the storage format do not overflow",
    )
    read: str = format_choice("bfloat16", "hands what it reads on in {value}")


@dataclass(frozen=True)
class Primitives(Group):
    scale: str = choice(
        ("divide", "reciprocal"),
        {
            "divide": "divides by the scale before it stores",
            "reciprocal": "multiplies by fp32(1 / scale) before it stores",
        },
    )


@dataclass(frozen=True)
class KvCacheContract(Contract):
    """store: c = round(x / scale);  read: x = c * scale.  Without fp8 storage there is no scale."""

    operator: ClassVar[str] = "kv_cache"
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        if self.rounding.storage not in FP8_FORMATS:
            if self.rounding.overflow != "saturate":
                raise ValueError(
                    "kv_cache: rounding.overflow must stay 'saturate' unless rounding.storage is an fp8 format"
                )
            if self.primitives.scale != "divide":
                raise ValueError(
                    "kv_cache: primitives.scale must stay 'divide' unless rounding.storage is an fp8 format"
                )


@dataclass
class PagedCache:
    """One layer's cache: ``keys`` and ``values``, float32, [pages, page size, KV heads, head_dim].

    What no token was written to is NaN, so that an operator that reads it cannot go unnoticed.
    """

    keys: Float32Array
    values: Float32Array
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return int(self.keys.shape[1])


def empty_cache(
    pages: int, page_size: int, heads: int, head_dim: int, key_scale: float = 1.0, value_scale: float = 1.0
) -> PagedCache:
    """A cache without tokens. Raises ValueError for a size below 1 or a scale not above 0."""
    for name, size in (("pages", pages), ("page_size", page_size), ("heads", heads), ("head_dim", head_dim)):
        if size < 1:
            raise ValueError(f"{name}: must be at least 1, got {size}")
    positive(key_scale, "key_scale")
    positive(value_scale, "value_scale")
    unwritten = np.full((pages, page_size, heads, head_dim), np.nan, np.float32)
    return PagedCache(unwritten, unwritten.copy(), key_scale, value_scale)


def write_cache(
    cache: PagedCache, slots: NDArray[Any], keys: Float32Array, values: Float32Array, contract: KvCacheContract
) -> None:
    """Store tokens, in place.

    Args:
        slots: integers, [tokens]: page * page size + offset, each at most once.
        keys, values: float32, [tokens, KV heads, head_dim].

    Raises:
        TypeError, ValueError: dtype, shape or byte order; a slot outside the cache or given twice.
    """
    pages, page_size, heads, head_dim = cache.keys.shape
    where = index_array(slots, "slots", "tokens", pages * page_size, "the cache")
    shape = f"tokens={where.size}, heads={heads}, head_dim={head_dim}"
    keys, values = float_array(keys, "keys", shape), float_array(values, "values", shape)
    if np.unique(where).size != where.size:
        raise ValueError("slots: one slot is written twice")
    cache.keys[where // page_size, where % page_size] = to_cache(keys, cache.key_scale, contract)
    cache.values[where // page_size, where % page_size] = to_cache(values, cache.value_scale, contract)


@quiet()
def to_cache(x: Float32Array, scale: float, contract: KvCacheContract) -> Float32Array:
    """The stored value of ``x``."""
    storage = contract.rounding.storage
    if storage not in FP8_FORMATS:
        return narrow(x, storage)
    factor = np.float32(scale)
    scaled = x / factor if contract.primitives.scale == "divide" else x * (np.float32(1) / factor)
    return narrow(scaled, storage, contract.rounding.overflow)


@quiet()
def from_cache(stored: Float32Array, scale: float, contract: KvCacheContract) -> Float32Array:
    """The value that attention sees."""
    if contract.rounding.storage in FP8_FORMATS:
        stored = stored * np.float32(scale)
    return narrow(stored, contract.rounding.read)


class KeyValues(Protocol):
    """Keys and values of one sequence, wherever they lie."""

    @property
    def length(self) -> int:
        """Number of tokens."""

    def read(self, start: int, stop: int) -> tuple[Float32Array, Float32Array]:
        """Keys and values of tokens [start, stop), float32, [stop - start, KV heads, head_dim] each."""


class DenseKeyValues:
    """Keys and values as plain arrays, float32, [tokens, KV heads, head_dim]."""

    def __init__(self, keys: Float32Array, values: Float32Array) -> None:
        self._keys = float_array(keys, "keys", "tokens, heads, head_dim")
        self._values = float_array(values, "values", "tokens, heads, head_dim")
        same_shape(self._values, "values", self._keys, "keys")

    @property
    def length(self) -> int:
        return int(self._keys.shape[0])

    def read(self, start: int, stop: int) -> tuple[Float32Array, Float32Array]:
        return self._keys[start:stop], self._values[start:stop]


class PagedKeyValues:
    """Keys and values of one sequence, read through its block table.

    Args:
        block_table: integers, [blocks]: the page of each run of ``page_size`` tokens.
        length: tokens of the sequence that are in the cache.

    Raises:
        TypeError, ValueError: block table not integers, pointing outside the cache, or too short for ``length``.
    """

    def __init__(self, cache: PagedCache, block_table: NDArray[Any], length: int, contract: KvCacheContract) -> None:
        self._table = index_array(block_table, "block_table", "blocks", cache.keys.shape[0], "the cache's pages")
        if not 0 <= length <= self._table.size * cache.page_size:
            raise ValueError(
                f"length: {length} tokens do not fit in {self._table.size} blocks of {cache.page_size} tokens"
            )
        self._cache, self._length, self._contract = cache, length, contract

    @property
    def length(self) -> int:
        return self._length

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Cache slots of tokens [start, stop)."""
        block, offset = np.divmod(np.arange(start, stop), self._cache.page_size)
        slots: NDArray[np.int64] = self._table[block] * self._cache.page_size + offset
        return slots

    def read(self, start: int, stop: int) -> tuple[Float32Array, Float32Array]:
        if not 0 <= start <= stop <= self._length:
            raise ValueError(f"tokens [{start}, {stop}) are outside the {self._length} tokens of the sequence")
        page, offset = np.divmod(self.slots(start, stop), self._cache.page_size)
        keys = from_cache(self._cache.keys[page, offset], self._cache.key_scale, self._contract)
        return keys, from_cache(self._cache.values[page, offset], self._cache.value_scale, self._contract)
