"""A trace of what a dump holds. What it lacks is unobserved in the trace, and unknown in its object record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffcheck.base.bits import DTYPES
from diffcheck.base.boundaries import graph
from diffcheck.base.errors import InputError
from diffcheck.base.record import ObjectRecord, model_fields
from diffcheck.base.samples import Sample
from diffcheck.capture.adapter import write_trace_of
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.recorder import Recorder
from diffcheck.foreign.files import plain_tensor
from diffcheck.rows import Rows
from reference.models.config import ModelConfig

#: What no dump of tensors says of the object that was computed.
UNKNOWN = ("weights", "attention_mask", "rope", "kv", "real_vocab", "padded_vocab", "shards", "temperature", "top_p",
           "top_k", "random_state")  # fmt: skip


@dataclass
class Dump:
    """Collects tensors of a dump by boundary and rows."""

    #: The project that wrote it.
    engine: str
    folder: Path
    model: Path
    config: ModelConfig
    samples: list[Sample]
    #: Tensors of the dump that are no boundary of the model.
    unused: set[str] = field(default_factory=set)
    #: Boundary -> why its values could not be taken.
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan = CapturePlan(tuple(self.samples), self.folder)
        self.recorder = Recorder(self.plan, graph(self.config))
        self._width = {node.name: node.width for node in self.recorder.boundaries}
        self._dtypes: dict[str, str] = {}

    def put(self, boundary: str, rows: Rows, tensor: Any, where: str) -> None:
        """Take one piece of a boundary; one that does not fit is refused by name and stays unobserved.

        Raises:
            InputError: no plain tensor.
        """
        tensor = plain_tensor(tensor, where)
        width, dtype = self._width.get(boundary), str(tensor.dtype).removeprefix("torch.")
        if width is None:
            self.unused.add(where)
        elif dtype not in DTYPES:
            self.refused[boundary] = f"{where} holds {dtype}, which is no format that is compared"
        elif tensor.numel() != len(rows) * width:
            self.refused[boundary] = f"{where} has shape {tuple(tensor.shape)}, expected {len(rows)} rows of {width}"
        elif self._dtypes.setdefault(boundary, dtype) != dtype:
            self.refused[boundary] = f"{where} holds {dtype}, and {self._dtypes[boundary]} elsewhere"
        else:
            self.recorder.observe(boundary, rows, tensor.reshape(len(rows), width))

    def write(
        self,
        out: Path,
        *,
        overwrite: bool,
        tokens: Sequence[Sequence[int]] | None,
        positions: Sequence[Sequence[int]] | None,
        versions: dict[str, str],
        evidence: dict[str, Any],
    ) -> list[str]:
        """Write the trace.

        Args:
            tokens, positions: as the dump holds them, one list a sample; None: it does not.

        Returns:
            The boundaries that it holds.

        Raises:
            InputError: nothing of the dump is a boundary of the model.
            TraceError: see `TraceWriter`.
        """
        observed = set(self._dtypes) - set(self.refused)
        if not observed:
            why = next(iter(self.refused.values()), "none of its names is a module of the model")
            raise InputError(f"{self.folder}: holds no boundary of {self.model}: {why}", "give the model of the dump")
        for name in self._width:
            reason = self.refused.get(name, f"the {self.engine} dump does not hold it")
            if name in self.refused:
                self.recorder.discard(name)
            if name not in observed:
                self.recorder.cannot_observe(name, reason)
        lengths = [s.forward_length for s in self.samples]
        unknown = [*UNKNOWN, *(["token_ids"] if tokens is None else []), *(["positions"] if positions is None else [])]
        record = ObjectRecord(
            model=model_fields(self.config),
            token_ids=[list(x) for x in tokens or [s.token_ids[:-1] for s in self.samples]],
            target_ids=[list(s.response_token_ids) for s in self.samples],
            positions=[list(x) for x in positions or [range(n) for n in lengths]],
            active=[[int(p in s.response_positions) for p in range(s.forward_length)] for s in self.samples],
            real_vocab=self.config.vocab_size,
            unknown=unknown,
        )
        dtypes = [self._dtypes[name] for name in self._width if name in observed]
        write_trace_of(
            CapturePlan(tuple(self.samples), out, overwrite=overwrite),
            EngineOptions(self.engine, self.model, dtype=max(set(dtypes), key=dtypes.count)),
            self.recorder,
            self.samples,
            record,
            versions=versions,
            evidence={"imported": {"from": str(self.folder), "unused": sorted(self.unused)[:100], **evidence}},
            phase="imported",
        )
        return sorted(observed - set(self.recorder.unobserved))
