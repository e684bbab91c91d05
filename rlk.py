"""rlk from Python: the functions of its commands, with plain texts or paths as arguments.

import rlk
rlk.compare("traces/rollout", "traces/train")
rlk.localize(rollout="reference", train="reference", overrides=["layers.1.mlp.act: flip=0,3,5"])
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any

from diffcheck.base.console import Terminal
from diffcheck.base.errors import InputError, RlkError
from diffcheck.base.progress import ProgressLine
from diffcheck.localize.verdict import Verdict
from diffcheck.trace.reader import Trace as _Trace
from reference.contract import Contract, profile
from reference.contract.names import offered

__all__ = ["RlkError", "Trace", "Verdict", "capture", "compare", "contract", "infer", "localize", "run_grpo"]

try:
    __version__ = version("rlk")
except PackageNotFoundError:
    __version__ = "source"

AnyPath = str | PathLike[str]


class Trace(_Trace):
    """An opened trace. See `diffcheck.trace.reader.Trace`; the folder may be a text."""

    def __init__(self, folder: AnyPath) -> None:
        super().__init__(Path(folder))


def compare(left: AnyPath, right: AnyPath) -> Verdict:
    """Compare two traces; ``left`` is the rollout side. Needs no engine.

    Raises:
        RlkError: a trace is damaged or missing; file and field are named.
    """
    from diffcheck.localize import localize as compare_traces
    from diffcheck.trace.joined import join

    with _progress() as progress:
        ours = Trace(left)
        return compare_traces(ours, join(ours, Trace(right)), progress)


def localize(rollout: AnyPath = "vllm", train: AnyPath = "megatron", **settings: Any) -> Verdict:
    """``rlk-diff localize``: name the first boundary at which two engines (or traces) diverge.

    Args:
        settings: fields of `diffcheck.runs.RunSettings`; ``overrides`` as texts of the command line.

    Raises:
        RlkError: anything a user can mend.
    """
    from diffcheck.runs import run_localize

    with _progress() as progress:
        return run_localize(_settings(settings), str(rollout), str(train), progress)[0]


def capture(engine: str, out: AnyPath, *, overwrite: bool = False, **settings: Any) -> Trace:
    """``rlk-diff capture``: record one engine's boundaries as the trace ``out``.

    Args:
        settings: as `localize`.

    Raises:
        RlkError: anything a user can mend.
    """
    from diffcheck.runs import run_capture

    with _progress() as progress:
        return Trace(run_capture(_settings(settings), engine, Path(out), progress, overwrite=overwrite).trace)


def infer(trace: AnyPath, boundary: str, model: AnyPath | None = None) -> dict[str, Any]:
    """``rlk-diff infer``: which contracts give a boundary's bits from the side's own inputs, as its ``--json`` says it.

    Raises:
        RlkError: the boundary was not recorded, or ``model`` does not hold the traced weights.
    """
    from diffcheck.infer.explain import infer as run_inference
    from diffcheck.infer.model import find_model

    with _progress() as progress:
        opened = Trace(trace)
        folder = find_model(opened.header, None if model is None else str(model))
        return run_inference(opened, boundary, folder, progress=progress).to_json()


def contract(operator: str, name: str = "strict-v1", dtype: str = "bfloat16") -> Contract:
    """The contract of an operator in the profile ``name``.

    Raises:
        RlkError: no such profile or operator.
    """
    try:
        return profile(name).contract(operator, dtype)
    except ValueError as error:
        raise InputError(str(error), "list them with rlk-diff contract list") from None


def run_grpo(out: AnyPath, *, resume: bool = False, **config: Any) -> list[dict[str, Any]]:
    """``rlk-grpo run``: the record of every step.

    Args:
        config: fields of `integration.grpo.config.GrpoConfig`.

    Raises:
        RlkError: anything a user can mend. The folder can be resumed.
    """
    from integration.grpo.config import load_config, stored_config
    from integration.grpo.loop import Run
    from integration.grpo.workers.engines import open_process

    chosen = load_config(None, config, stored_config(Path(out)) if resume else None)
    return Run(chosen, Path(out), open_process, resume=resume, command="rlk.run_grpo").run()


def _progress() -> ProgressLine:
    return ProgressLine(Terminal(stderr=True))


def _settings(given: dict[str, Any]) -> Any:
    from diffcheck.capture.overrides import parse_override
    from diffcheck.runs import RunSettings

    known = [f.name for f in fields(RunSettings)]
    for name in given:
        if name not in known:
            raise InputError(f"setting {name!r} is unknown", offered(name, known))
    values = dict(given)
    for name in ("samples", "keep", "html"):
        if values.get(name) is not None:
            values[name] = Path(values[name])
    texts: Iterable[Any] = values.get("overrides", ())
    values["overrides"] = tuple(parse_override(text) if isinstance(text, str) else text for text in texts)
    return RunSettings(**values, given=frozenset(given))
