"""The interface every engine adapter has, and the registry that finds one by name.

An adapter opens a live engine once and then runs any number of capture plans through it. It knows its engine's module
tree and nothing about traces: it gives tensors to a `Recorder` and fills an `ObjectRecord` from what it sees live.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from diffcheck.base.errors import InputError
from diffcheck.base.models import model_name
from diffcheck.base.processor import processor_class
from diffcheck.base.progress import Progress
from diffcheck.base.record import ObjectRecord
from diffcheck.base.samples import Sample
from diffcheck.capture.patches import Patch
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.recorder import Recorder
from diffcheck.rows import expected_rows
from diffcheck.trace.schema import Header
from diffcheck.trace.writer import TraceWriter
from reference.contract.names import offered

#: Engine name -> module with a class ``Adapter``.
ENGINES = {
    "vllm": "diffcheck.capture.vllm",
    "megatron": "diffcheck.capture.megatron",
    "transformers": "diffcheck.capture.transformers",
    "reference": "diffcheck.capture.reference",
}
#: Engines that can generate a response themselves; the others score given ones.
GENERATING = ("vllm", "transformers")


@dataclass
class CaptureResult:
    """What one capture gave, besides the trace on disk."""

    #: The plan's samples, with generated responses and the engine's own logprobs filled in.
    samples: list[Sample]
    trace: Path
    #: Wall seconds by step: "forward", "write", ...
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"samples": [s.to_json() for s in self.samples], "trace": str(self.trace), "seconds": self.seconds}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CaptureResult:
        return cls([Sample.from_json(s) for s in data["samples"]], Path(data["trace"]), data["seconds"])


class Adapter(Protocol):
    """A live engine. Construction starts it.

    Raises (construction):
        EngineError: the engine is not installed, of an unsupported version, or failed to start.
        InputError: an option it does not know.
    """

    def __init__(self, options: EngineOptions, progress: Progress) -> None: ...

    def capture(self, plan: CapturePlan, progress: Progress) -> CaptureResult:
        """Run ``plan`` and write its trace to ``plan.out``. May be called again and again, with any interventions.

        Raises:
            EngineError: the engine failed; nothing is left at ``plan.out``.
            InputError: the plan asks for what the engine cannot do (named).
        """

    def close(self) -> None:
        """Give memory, processes and ports back."""


def open_adapter(options: EngineOptions, progress: Progress) -> Adapter:
    """Start the engine that ``options`` names, in this process.

    Raises:
        InputError: unknown engine.
    """
    if options.engine not in ENGINES:
        raise InputError(f"engine {options.engine!r} is unknown", offered(options.engine, ENGINES))
    module = importlib.import_module(ENGINES[options.engine])
    adapter: Adapter = module.Adapter(options, progress)
    return adapter


def write_trace_of(
    plan: CapturePlan,
    options: EngineOptions,
    recorder: Recorder,
    samples: list[Sample],
    record: ObjectRecord,
    *,
    versions: dict[str, str],
    evidence: dict[str, Any],
    phase: str | None = None,
) -> None:
    """Write what ``recorder`` saw of ``samples`` (responses included) as the trace ``plan.out``, atomically, and what
    the operators computed before anything was aligned as ``plan.computed``, if the plan has one.

    Args:
        phase: what really ran, where the engine has no choice; default: what was planned.
    """
    for out in (plan.computed, plan.out):
        if out is None:
            continue
        writer = TraceWriter(out, plan.level, overwrite=plan.overwrite)
        try:
            changed = describe_changes(plan, options, recorder)
            recorder.write(writer, expected_rows(samples), computed=out is plan.computed)
            writer.finish(
                Header(
                    engine=options.engine,
                    versions=versions,
                    tensor_parallel=options.tensor_parallel,
                    dtype=options.dtype,
                    phase=phase or plan.phase,
                    level=plan.level,
                    object=record,
                    boundaries={},
                    samples=[s.to_json() for s in samples],
                    evidence={**evidence, "processor": processor_class(), "model": model_name(options.model)},
                    changed=changed,
                    unobserved=recorder.unobserved,
                )
            )
        except BaseException:
            writer.abort()
            raise


def describe_changes(plan: CapturePlan, options: EngineOptions, recorder: Recorder) -> list[str]:
    """Everything that was changed on purpose and took effect, one line each.

    Raises:
        InputError: an intervention that met nothing.
    """
    lines = [f"model {k} = {v}" for k, v in options.model_overrides.items()]
    lines += [f"weight {name}[{index}]: bit {bit} flipped" for name, index, bit in options.weight_flips]
    lines += [Patch("", Path(file), name).in_words() for file, name in options.patches]
    if plan.position_offset:
        lines.append(f"positions + {plan.position_offset}")
    lines += plan.changes
    lines += [f"{where}: {k} = {v}" for where, fields in plan.contract_overrides.items() for k, v in fields.items()]
    return lines + recorder.changed()


def with_logprobs(
    sample: Sample,
    response: tuple[int, ...],
    logprobs: tuple[float, ...],
    prompt: tuple[float, ...] | None = None,
) -> Sample:
    """The finished sample: response and the engine's own logprobs (natural logarithms, exact float32 values) filled
    in.

    Args:
        prompt: logprobs of the prompt's tokens but its first, where the engine returned them.
    """
    return replace(sample, response_token_ids=response, rollout_logprobs=logprobs, prompt_logprobs=prompt)


def own_version() -> str:
    """The installed release of this project; ``source`` where it is only on the path."""
    return package_versions("rlk").get("rlk", "source")


def package_versions(*names: str) -> dict[str, str]:
    """Installed versions by distribution name; absent ones are left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
