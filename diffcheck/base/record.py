"""The object record: what must match before any float is compared.

Two engines that did not compute the same object (weights, tokens, positions, mask, RoPE, cache contents, vocabulary,
sampling) cannot be told apart from two engines with different kernels by looking at floats. So every field here is read
from the live engine, not from its configuration, wherever the engine allows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from reference.models.config import MOE_FIELDS, ModelConfig

#: What the fields of a record can hold; a reader refuses anything else. A token of -1 is one that was not seen.
Token = Annotated[int, Meta(ge=-1, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Positive = Annotated[float, Meta(gt=0, lt=1e308)]

#: Fields of the record that older traces do not have.
_LATER = {"rope_tables", "layers", "unknown"}


@dataclass
class KvMapping:
    """Where each logical position of each sample lives in the engine's cache.

    Physical layouts may differ between engines (block tables are private); the mapping must only be a faithful one:
    every position in exactly one slot, no slot used twice by one sample.
    """

    #: "paged", or "contiguous" for an engine that keeps no cache.
    layout: str = "contiguous"
    block_size: int | None = None
    #: One list a sample: the flat cache slot of each position; empty for a contiguous layout.
    slots: list[list[int]] = field(default_factory=list)

    def logical(self, lengths: Iterable[int]) -> list[str]:
        """One word a sample, equal between engines whose mapping is faithful: "0..n-1 once", or what is wrong with
        it.
        """
        out = []
        for i, n in enumerate(lengths):
            if self.layout == "contiguous":
                out.append(f"0..{n - 1} once")
                continue
            slots = self.slots[i] if i < len(self.slots) else []
            if len(slots) != n:
                out.append(f"{len(slots)} slots for {n} positions")
            elif len(set(slots)) != n:
                out.append("a slot holds two positions")
            else:
                out.append(f"0..{n - 1} once")
        return out


@dataclass
class ObjectRecord:
    """What one side computed. Lists run over samples; inner lists over positions fed forward."""

    #: Sizes and switches of the architecture (`reference.models.config.ModelConfig` as a dict, without the dtype).
    model: dict[str, Any] = field(default_factory=dict)
    #: HF name -> `weight_digest` of the live parameter in HF layout.
    weights: dict[str, str] = field(default_factory=dict)
    weight_version: int | None = None
    #: Tokens as the engine's embedding received them.
    token_ids: list[list[Token]] = field(default_factory=list)
    #: Tokens whose logprobs are compared.
    target_ids: list[list[Token]] = field(default_factory=list)
    #: Positions as the engine's rotary embedding received them.
    positions: list[list[int]] = field(default_factory=list)
    #: 1 where the position predicts a token that counts in the loss.
    active: list[list[Annotated[int, Meta(ge=0, le=1)]]] = field(default_factory=list)
    attention_mask: str = "causal"
    #: Rotary dimension, and theta, scaling and attention factor where the live table is, in every frequency, the one
    #: that they give; a table that no parameters give has none of them here, only its bits in `rope_tables`.
    rope: dict[str, Any] = field(default_factory=dict)
    #: Live tables of RoPE, one entry a distinct table: see `diffcheck.live_model.rope.table_entry`.
    rope_tables: list[dict[str, Any]] = field(default_factory=list)
    #: Field -> boundary -> what the live module there computes with: "epsilon", "scale", "bias", "heads", "kv_scale",
    #: "dtype".
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    kv: KvMapping = field(default_factory=KvMapping)
    real_vocab: Count = 0
    #: Rows of the engine's own embedding table and head; may differ.
    padded_vocab: Count = 0
    #: boundary layout "column": [start, stop) of the global width, one pair a rank, as fractions of the width's units.
    shards: dict[str, list[Annotated[list[int], Meta(min_length=2, max_length=2)]]] = field(default_factory=dict)
    temperature: Positive = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    #: Seed of the draw, where the engine sampled; None where tokens were given.
    random_state: dict[str, Any] | None = None
    #: Fields that this side cannot know (another system recorded its logprobs and nothing else): never compared.
    unknown: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def check_fields(cls, data: dict[str, Any]) -> None:
        """Raises:
        ValueError: a field is missing or unknown; it is named.
        """
        names = {f.name for f in fields(cls)}
        if missing := sorted(names - set(data) - _LATER):
            raise ValueError(f"object record: field {missing[0]!r} is missing")
        if unknown := sorted(set(data) - names):
            raise ValueError(f"object record: unknown field {unknown[0]!r}")


def weight_digest(tensor: Any) -> str:
    """SHA-256 over shape and float32 values of a weight in HF layout.

    Every format here widens to float32 exactly, so a norm weight kept in float32 by one engine and in bfloat16 by the
    other is the same object exactly when its values are. Accepts a torch tensor or a NumPy array.
    """
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().to("cpu").float().contiguous().numpy()
    values = np.ascontiguousarray(tensor, dtype=np.float32)
    digest = hashlib.sha256(repr(tuple(values.shape)).encode())
    digest.update(values.data if values.size else b"")
    return digest.hexdigest()


def model_fields(config: ModelConfig) -> dict[str, Any]:
    """``ObjectRecord.model`` of a model: its fields but the dtype, as JSON holds them.

    A dense model has none of a mixture of experts: its records are what they were before there were others.
    """
    absent = {"dtype"} if config.num_experts else {"dtype", *MOE_FIELDS}
    found = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in absent}
    found["rope_scaling"] = [list(pair) for pair in config.rope_scaling]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
