"""Two engines on one small model, each with faults of its own, as the sides of an ablation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.ablate import Ablation, Side, ablate
from diffcheck.base.boundaries import graph
from diffcheck.base.models import make_random_model
from diffcheck.base.samples import Sample
from diffcheck.capture.adapter import Adapter, CaptureResult, open_adapter
from diffcheck.capture.overrides import apply_overrides, parse_override
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.trace.reader import Trace
from reference.models.config import ModelConfig

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 61,
}


@dataclass
class Engine:
    """An engine in this process, with what a session has."""

    adapter: Adapter
    plans: list[CapturePlan] = field(default_factory=list)

    def capture(self, plan: CapturePlan) -> CaptureResult:
        self.plans.append(plan)
        return self.adapter.capture(plan, lambda *_: None)


class Bench:
    """Both sides of one model in ``folder``."""

    def __init__(self, folder: Path, lengths: tuple[tuple[int, int], ...] = ((4, 3), (2, 4)), **shape: Any) -> None:
        self.folder, self.model = folder, folder / "model"
        self.model.mkdir()
        make_random_model(self.model, **{**SHAPE, **shape})
        self.config = ModelConfig.from_folder(self.model)
        rng = np.random.default_rng(3)

        def ids(n: int) -> tuple[int, ...]:
            return tuple(int(t) for t in rng.integers(3, self.config.vocab_size, n))

        self.samples = tuple(Sample(ids(prompt), ids(response)) for prompt, response in lengths)
        self._made = 0

    def side(
        self, role: str, *overrides: str, engine: str = "reference", profile: str | None = "strict-v1", **plan: Any
    ) -> Side:
        """A live side with ``overrides`` (as on the command line, without a side)."""
        self._made += 1
        scratch = self.folder / f"side{self._made}"
        scratch.mkdir()
        whole = CapturePlan(**{"samples": self.samples, "out": scratch / "native", "phase": "prefill", **plan})
        options, whole = apply_overrides(
            [parse_override(text) for text in overrides], EngineOptions(engine, self.model, profile=profile), whole
        )
        live = Engine(open_adapter(options, lambda *_: None))
        return Side(role, Trace(live.capture(whole).trace), scratch, live, whole)

    def ablate(self, host: Side, donor: Side, **options: Any) -> Ablation:
        return ablate(host, donor, graph(self.config), self.model, **options)
