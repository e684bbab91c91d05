"""What to capture, as data: one JSON-able plan drives every adapter, in this process or in another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from diffcheck.base.samples import Sample
from diffcheck.capture.interventions import Intervention, received, sent

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is started. One engine lives through many plans of the same options."""

    engine: str
    #: Folder with config.json and *.safetensors.
    model: Path
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    #: "cpu" or "cuda".
    device: str = "cpu"
    #: Arithmetic profile: of the reference engine, or of a strict plugin in a real engine; None is native.
    profile: str | None = None
    max_length: int = 512
    #: Requests in flight at once (real continuous batching needs several).
    max_sequences: int = 8
    #: Overrides of the object itself, applied when the model is built: {"rope_theta": 5e5}.
    model_overrides: dict[str, Any] = field(default_factory=dict)
    #: Flip one bit of a weight before it is loaded: [HF name, flat index, bit].
    weight_flips: tuple[tuple[str, int, int], ...] = ()
    #: Functions called with the live model before the first run: [absolute file, name].
    patches: tuple[tuple[str, str], ...] = ()
    #: Engine-specific switches, e.g. {"block_size": 32}; an adapter refuses names it does not know.
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "model": str(self.model)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EngineOptions:
        flips = tuple((str(n), int(i), int(b)) for n, i, b in data.get("weight_flips", ()))
        patches = tuple((str(file), str(name)) for file, name in data.get("patches", ()))
        return cls(**{**data, "model": Path(data["model"]), "weight_flips": flips, "patches": patches})


@dataclass(frozen=True)
class CapturePlan:
    """One capture: samples through a live engine into one trace."""

    samples: tuple[Sample, ...]
    out: Path
    #: decode: prompts are prefilled, then every response token is decoded in its own step, several requests in flight.
    #: prefill: whole sequences are scored in one pass each.
    phase: Phase = "decode"
    level: str = "full"
    #: At level "sampled": this many rows of each boundary, evenly spread.
    sampled_rows: int = 64
    #: Layers captured, [first, last); None is all of them.
    layers: tuple[int, int] | None = None
    #: Response length to generate for samples that have none (decode phase of a rollout engine only).
    generate: int = 32
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    weight_version: int | None = None
    #: Added to every position: a fault on purpose.
    position_offset: int = 0
    #: Contract overrides for engines that follow contracts: {"layers.*.mlp.act": {"rounding.silu": "bfloat16"}}.
    contract_overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    interventions: tuple[Intervention, ...] = ()
    #: What else of this plan was changed on purpose, in words.
    changes: tuple[str, ...] = ()
    #: Observe nothing but the logprobs: the twin run that shows that observing changes no bit.
    observe: bool = True
    #: Also write what each operator gave before aligning interventions replaced it: a second trace, here.
    computed: Path | None = None
    overwrite: bool = False

    def to_json(self) -> dict[str, Any]:
        data = asdict(replace(self, samples=(), interventions=()))
        return {
            **data,
            "out": str(self.out),
            "computed": None if self.computed is None else str(self.computed),
            "samples": [s.to_json() for s in self.samples],
            "interventions": [sent(i) for i in self.interventions],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CapturePlan:
        return cls(
            **{
                **data,
                "out": Path(data["out"]),
                "computed": Path(data["computed"]) if data.get("computed") else None,
                "samples": tuple(Sample.from_json(s) for s in data["samples"]),
                "layers": tuple(data["layers"]) if data.get("layers") else None,
                "changes": tuple(data.get("changes", ())),
                "interventions": tuple(received(i) for i in data.get("interventions", ())),
            }
        )

    def dumps(self) -> str:
        return json.dumps(self.to_json())
