"""Which tokens a step feeds, and where their keys and values lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference.models.config import ModelConfig
from reference.operators.kv_cache import KvCacheContract, PagedCache, PagedKeyValues, empty_cache

Integers = NDArray[np.int64]
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Rows:
    """The tokens of one step, four arrays [rows]; rows of one sample lie together, positions ascending."""

    sample: Integers
    #: Index of the token in its sequence: where its key lies and what it may see.
    position: Integers
    token: Integers
    #: What RoPE is told; the same as ``position`` unless somebody wants it otherwise.
    rope_position: Integers

    def __len__(self) -> int:
        return int(self.sample.size)

    def take(self, index: Integers) -> Rows:
        """Some of the rows."""
        return Rows(self.sample[index], self.position[index], self.token[index], self.rope_position[index])

    def by_sample(self) -> Iterator[tuple[int, slice]]:
        """(sample, its rows) for every sample of the step."""
        edges = [0, *(np.flatnonzero(np.diff(self.sample)) + 1).tolist(), len(self)]
        for first, last in itertools.pairwise(edges):
            yield int(self.sample[first]), slice(first, last)


@dataclass
class PagedState:
    """The KV cache of every layer and the pages of every sequence. The one thing here that changes over time."""

    caches: list[PagedCache]
    block_tables: list[Integers]

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        lengths: Sequence[int],
        page_size: int = 16,
        block_tables: Sequence[Integers] | None = None,
    ) -> PagedState:
        """An empty cache with room for ``lengths`` tokens of each sequence.

        Raises:
            ValueError: page size below 1; a block table that is too short for its sequence or shares a page.
        """
        if page_size < 1:
            raise ValueError(f"page_size: must be at least 1, got {page_size}")
        needed = [-(-length // page_size) for length in lengths]
        tables = interleaved_tables(needed) if block_tables is None else [np.asarray(t, np.int64) for t in block_tables]
        if len(tables) != len(needed):
            raise ValueError(f"block_tables: expected {len(needed)}, one per sequence, got {len(tables)}")
        for sample, (table, count) in enumerate(zip(tables, needed, strict=True)):
            if table.size < count:
                raise ValueError(f"block_tables[{sample}]: {count} pages needed, got {table.size}")
        used = np.concatenate([*tables, np.zeros(0, np.int64)])
        if np.unique(used).size != used.size or used.min(initial=0) < 0:
            raise ValueError("block_tables: a page is used twice or negative")
        pages = int(used.max(initial=0)) + 1
        heads, head_dim = config.num_key_value_heads, config.head_dim
        caches = [empty_cache(pages, page_size, heads, head_dim) for _ in range(config.num_hidden_layers)]
        return cls(caches, tables)

    def slots(self, rows: Rows) -> Integers:
        """Cache slot of every row."""
        page_size = self.caches[0].page_size
        page = [self.block_tables[s][p // page_size] for s, p in zip(rows.sample, rows.position, strict=True)]
        return np.array(page, np.int64) * page_size + rows.position % page_size

    def key_values(self, layer: int, sample: int, length: int, contract: KvCacheContract) -> PagedKeyValues:
        """Reader of the first ``length`` tokens of a sequence."""
        return PagedKeyValues(self.caches[layer], self.block_tables[sample], length, contract)


def interleaved_tables(needed: Sequence[int]) -> list[Integers]:
    """Block tables that deal pages out in turn, the last page first: neighbours in a sequence never lie together."""
    tables: list[list[int]] = [[] for _ in needed]
    page = sum(needed)
    for turn in range(max(needed, default=0)):
        for table, count in zip(tables, needed, strict=True):
            if turn < count:
                page -= 1
                table.append(page)
    return [np.array(table, np.int64) for table in tables]


def schedule(
    batch: Sequence[Sequence[int]],
    prompts: Sequence[int],
    rope_positions: Sequence[Sequence[int]] | None,
    phase: Phase,
    chunk: int | None,
) -> Iterator[Rows]:
    """The steps that feed every token of ``batch`` but each sequence's last."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: must be at least 1 or None, got {chunk}")
    if rope_positions is not None and [len(p) for p in rope_positions] != [len(t) for t in batch]:
        raise ValueError("rope_positions: expected one position per token of every sequence")
    ends = [prompt if phase == "decode" else len(t) - 1 for t, prompt in zip(batch, prompts, strict=True)]
    fed = [0] * len(batch)
    while any(done < len(tokens) - 1 for done, tokens in zip(fed, batch, strict=True)):
        parts = []
        for sample, tokens in enumerate(batch):
            first, last = fed[sample], len(tokens) - 1
            stop = min(ends[sample], last, first + (chunk or last)) if first < ends[sample] else min(first + 1, last)
            parts += [(sample, position) for position in range(first, stop)]
            fed[sample] = stop
        where = np.array(parts, np.int64)
        token = np.array([batch[s][p] for s, p in parts], np.int64)
        rope = np.array([rope_positions[s][p] for s, p in parts], np.int64) if rope_positions else where[:, 1]
        yield Rows(where[:, 0], where[:, 1], token, rope)


def check_batch(batch: Sequence[Sequence[int]], prompts: Sequence[int], config: ModelConfig) -> None:
    """Raise ValueError for an empty batch, a sequence, prompt length or token that the model cannot take."""
    if not batch:
        raise ValueError("batch: expected at least one sequence")
    if len(prompts) != len(batch):
        raise ValueError(f"prompt_lengths: expected {len(batch)}, one per sequence, got {len(prompts)}")
    for sample, (tokens, prompt) in enumerate(zip(batch, prompts, strict=True)):
        if len(tokens) < 2:
            raise ValueError(
                f"batch[{sample}]: expected at least 2 tokens, one to feed and one to score, got {len(tokens)}"
            )
        if len(tokens) > config.max_position_embeddings:
            raise ValueError(
                f"batch[{sample}]: {len(tokens)} tokens exceed the model's {config.max_position_embeddings}"
            )
        if not 1 <= prompt < len(tokens):
            raise ValueError(f"prompt_lengths[{sample}]: must be 1 to {len(tokens) - 1}, got {prompt}")
        for position, token in enumerate(tokens):
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"batch[{sample}][{position}]: token {token} is outside the vocabulary of {config.vocab_size}"
                )
