"""What the data buffer holds, as values: samples, steps and weight versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Generated:
    """A response as the rollout engine returned it; logprobs are float32, one a token, in nats."""

    id: str
    response_token_ids: Sequence[int] | TokenIds
    rollout_logprobs: Logprobs
    finish_reason: str
    #: Of the weights that the engine held.
    weight_version: int


@dataclass(frozen=True)
class Scored:
    """Logprobs of a response as the trainer recomputed them (float32, one a token), and the sample's advantage."""

    id: str
    train_logprobs: Logprobs
    advantage: float


@dataclass(frozen=True)
class Buffered:
    """A sample as a row of the buffer; what its state has not brought yet is None."""

    id: str
    step: int
    prompt_index: int
    group_index: int
    state: str
    weight_version: int | None
    prompt_token_ids: TokenIds
    response_token_ids: TokenIds | None
    rollout_logprobs: Logprobs | None
    train_logprobs: Logprobs | None
    reward: float | None
    advantage: float | None
    finish_reason: str | None
    #: Of the draws of its tokens.
    seed: int

    @classmethod
    def of(cls, row: Sequence[Any]) -> Buffered:
        """From a row of `COLUMNS`."""
        values = dict(zip(COLUMNS, row, strict=True))
        for name, kind in _ARRAYS.items():
            if values[name] is not None:
                values[name] = np.frombuffer(values[name], kind)
        return cls(**values)


#: Columns of table samples, in order.
COLUMNS = tuple(field.name for field in fields(Buffered))
_ARRAYS = {"prompt_token_ids": "<i4", "response_token_ids": "<i4", "rollout_logprobs": "<f4", "train_logprobs": "<f4"}


@dataclass(frozen=True)
class Step:
    """A row of table steps. ``samples`` is how many were planned."""

    step: int
    state: str
    samples: int
    rollout_version: int
    train_version: int | None


@dataclass(frozen=True)
class Weights:
    """A row of table weights: ``digest`` of what the update of ``step`` made (0: what the run began with)."""

    version: int
    step: int
    digest: str


def samples_digest(samples: Iterable[Buffered]) -> str:
    """SHA-256 over ids, tokens and the bit patterns of both logprobs, by sample id; aborted samples are left out."""
    digest = hashlib.sha256()
    for sample in sorted(samples, key=lambda sample: sample.id):
        if sample.state == "aborted":
            continue
        digest.update(sample.id.encode())
        for name in _ARRAYS:
            array = getattr(sample, name)
            data = b"" if array is None else array.tobytes()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
