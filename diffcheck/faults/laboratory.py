"""Where faults are injected: the reference engine on a small model, one honest side and one faulty side."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.models import make_random_model
from diffcheck.base.progress import silent
from diffcheck.base.samples import Sample
from diffcheck.capture.interventions import Intervention
from diffcheck.capture.overrides import Override, apply_overrides, parse_override
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.reference import Adapter
from diffcheck.faults.library import FAULTS, Fault
from diffcheck.faults.outcome import Outcome
from diffcheck.infer import explain
from diffcheck.infer.repeat import unrepeated, withdraw
from diffcheck.infer.weights import TracedWeights
from diffcheck.localize import localize
from diffcheck.rows import expected_rows
from diffcheck.trace.reader import Trace
from reference.checks import Float32Array
from reference.contract import profile
from reference.models.config import ModelConfig

#: Two layers; 4 key-value heads, so that 4 ranks can share them.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 97,
}
#: (prompt, response) lengths: one sample longer than an attention block, prompts of at least 8 tokens.
LENGTHS = ((70, 5), (11, 6), (9, 3))
PROFILE = "strict-v1"


class Laboratory:
    """A small model and its samples in ``folder``; every run is a capture by the reference engine.

    Args:
        dtype: of the model: bfloat16 or float32.
    """

    def __init__(self, folder: Path, dtype: str = "bfloat16", tensor_parallel: int = 1) -> None:
        self.folder, self.dtype, self.tensor_parallel = folder, dtype, tensor_parallel
        self.model = folder / "model"
        if not (self.model / "config.json").is_file():
            self.model.mkdir(parents=True, exist_ok=True)
            make_random_model(self.model, **SHAPE)
        self.config = ModelConfig.from_folder(self.model)
        rng = np.random.default_rng(11)

        def ids(n: int) -> tuple[int, ...]:
            return tuple(int(t) for t in rng.integers(3, self.config.vocab_size, n))

        self.samples = tuple(Sample(ids(prompt), ids(response)) for prompt, response in LENGTHS)
        self._runs = 0

    def contract(self, operator: str) -> Any:
        """The honest side's contract of ``operator``."""
        return profile(PROFILE).contract(operator, self.dtype)

    def weight(self, name: str) -> Float32Array:
        """A weight as the honest side holds it."""
        digests = self.run(()).header.object.weights
        return TracedWeights(self.model, digests, self.dtype)[name]

    def places(self) -> list[tuple[int, int]]:
        """(sample, position) of every row."""
        return expected_rows(self.samples)["all"].places()

    def stale_trace(self) -> Trace:
        """A run with the last step's weights: keys and values came from other projections."""
        flips = tuple((f"model.layers.0.self_attn.{part}_proj.weight", 64 * i, 5) for part in "kv" for i in range(64))
        return self.run((), weight_flips=flips)

    def run(
        self,
        overrides: tuple[Override, ...],
        interventions: tuple[Intervention, ...] = (),
        phase: str = "decode",
        weight_flips: tuple[tuple[str, int, int], ...] = (),
        **extra: Any,
    ) -> Trace:
        """One side: its trace."""
        self._runs += 1
        out = self.folder / f"run{self._runs}-{self.dtype}-{self.tensor_parallel}"
        shutil.rmtree(out, ignore_errors=True)
        ranks = int(extra.pop("tensor_parallel", self.tensor_parallel))
        options = EngineOptions(
            "reference", self.model, self.dtype, ranks, profile=PROFILE, weight_flips=weight_flips, extra=extra
        )
        plan = CapturePlan(self.samples, out, phase, interventions=interventions)  # type: ignore[arg-type]
        options, plan = apply_overrides(overrides, options, plan)
        return Trace(Adapter(options, silent).capture(plan, silent).trace)


def describe(fault: Fault) -> str:
    """The pair in words."""
    return f"reference, {fault.dtype}"


def run_fault(fault: Fault, folder: Path, explained: bool = True) -> Outcome:
    """Inject ``fault``, compare with the honest side, and check what the tool names.

    Args:
        folder: for the model and the traces.
        explained: also run inference where the fault says which contract fields it must name.

    Raises:
        InputError: the fault cannot be injected, which is an error and not a miss.
    """
    started = time.monotonic()
    lab = Laboratory(folder, fault.dtype, fault.tensor_parallel)
    parsed = tuple(parse_override(text) for text in fault.overrides)
    left = lab.run(_of(parsed, "rollout"), phase=fault.phase)
    right = _right(fault, lab, parsed)
    outcome = Outcome(fault.name, describe(fault), fault.verdict, fault.where)
    report = localize(left, right)
    if fault.rerun:
        again = lab.run(tuple(parse_override(text) for text in fault.rerun), phase=fault.phase)
        withdraw(report, {"left": "", "right": unrepeated(right, again)})
    outcome.judge(report, spared=int(fault.spares_first_position))
    if (fault.fields or fault.unexplained) and explained and not outcome.wrong:
        _check_fields(fault, left, right, lab, outcome)
    if fault.then and not outcome.wrong:
        _check_second(fault, lab, outcome)
    outcome.seconds = time.monotonic() - started
    return outcome


def _of(overrides: tuple[Override, ...], side: str) -> tuple[Override, ...]:
    return tuple(o for o in overrides if o.side == side)


def _right(fault: Fault, lab: Laboratory, overrides: tuple[Override, ...]) -> Trace:
    phase = fault.right.get("phase", fault.phase)
    extra = {k: v for k, v in fault.right.items() if k != "phase"}
    return lab.run(_of(overrides, "train"), _made(fault, lab), phase, **extra)


def _check_fields(fault: Fault, left: Trace, right: Trace, lab: Laboratory, outcome: Outcome) -> None:
    assert outcome.report is not None
    contracts = explain(outcome.report, left, right, lab.model, budget=120, probe=False)
    outcome.judge_fields([d["field"] for d in contracts["differs_in"]], fault.fields)


def _check_second(fault: Fault, lab: Laboratory, outcome: Outcome) -> None:
    """With both faults in the right side the first is named; with the first one aligned, the second."""
    second = FAULTS[fault.then]
    both = tuple(parse_override(text) for text in (*fault.overrides, *second.overrides))
    aligned = tuple(replace(o, side="rollout") for o in _of(both, "train") if o.text in fault.overrides)
    right = lab.run(_of(both, "train"), (*_made(fault, lab), *_made(second, lab)))
    lefts = (lab.run(()), fault.where), (lab.run(aligned, _made(fault, lab)), second.where)
    for left, expected in lefts:
        first = localize(left, right).first_divergence
        if first is None or first.boundary != expected:
            outcome.wrong.append(f"of the two faults, named {first.boundary if first else 'nothing'}, not {expected}")


def _made(fault: Fault, lab: Laboratory) -> tuple[Intervention, ...]:
    return fault.interventions(lab) if fault.interventions else ()
