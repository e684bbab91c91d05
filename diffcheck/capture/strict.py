"""The door through which a strict path enters a real engine's adapter.

This layer knows no strict path: a package that has one names it under the entry point group `GROUP`, one entry point
per engine, whose object has the functions that the engine's adapter calls. See `integration.vllm.plugin` and
`integration.megatron.plugin`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from diffcheck.base.errors import EngineError, InputError
from diffcheck.capture.plan import EngineOptions
from reference.contract import profile as find_profile
from reference.models.config import ModelConfig

GROUP = "rlk.strict"
#: By it a strict path chooses its profile in an engine that nobody started through here.
VARIABLE = "RLK_PROFILE"
#: Head sizes of vLLM 0.32's attention on a CPU, the strict one's included.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_NO_PATH = "install this project with its integration package (make setup)"


class StrictPath(Protocol):
    """What the strict path of every engine offers. A module will do."""

    def prepare(self, profile: str, /) -> None:
        """Make the engine of this process follow ``profile``, before it starts.

        Raises:
            ValueError: an unknown profile, or one that no engine can follow.
            RuntimeError: not for this release of the engine, or not on this device.
        """

    def live_operators(self, model: Any, /) -> Any:
        """What the live model computes with, for whoever changes a contract on purpose."""


class VllmStrictPath(StrictPath, Protocol):
    """As vLLM's worker uses it."""

    def begin(self, runner: Any, model: Any, /) -> None:
        """Check that the path is in place, and count from zero. Raises RuntimeError."""

    def evidence(self, layers: int, steps: int, /) -> dict[str, Any]:
        """What ran since `begin`. Raises RuntimeError if something else computed in its place."""

    def weight_digests(self, worker: Any, config: Any, /) -> dict[str, str]:
        """HF name -> digest of the weights that the strict layers hold."""


class MegatronStrictPath(StrictPath, Protocol):
    """As the Megatron adapter uses it."""

    def begin(self, model: Any, /) -> None:
        """Check that the path is in place, and count from zero. Raises RuntimeError."""

    def evidence(self, model: Any, forwards: int, /) -> dict[str, Any]:
        """What ran since `begin`. Raises RuntimeError if something else computed in its place."""

    def specification(self, config: Any, theta: float, /, *, device: str = "cpu") -> Any:
        """Megatron's layer specification made of the strict modules, for a model that will compute on ``device``."""

    def finish(self, model: Any, /) -> Any:
        """Put in what no specification reaches, once the model is built."""

    def logprobs(
        self,
        model: Any,
        logits: Any,
        targets: Any,
        /,
        *,
        vocabulary: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        see: Callable[[str, Any], Any] = ...,
    ) -> Any:
        """Log-probabilities of ``targets`` [batch, sequence] from this rank's ``logits``, float32."""


def strict_path(options: EngineOptions) -> StrictPath | None:
    """The strict path of the engine that ``options`` names, made ready for its profile; None for a native run.

    Raises:
        InputError: an unknown profile, or one that no engine can follow.
        EngineError: no strict path is installed for the engine, or not for its release, or one that lacks a function.
    """
    path: StrictPath | None = _load(options, StrictPath)
    return path


def vllm_path(options: EngineOptions) -> VllmStrictPath | None:
    """As `strict_path`, for vLLM's worker."""
    path: VllmStrictPath | None = _load(options, VllmStrictPath)
    return path


def megatron_path(options: EngineOptions) -> MegatronStrictPath | None:
    """As `strict_path`, for the Megatron adapter."""
    path: MegatronStrictPath | None = _load(options, MegatronStrictPath)
    return path


def check_start(options: EngineOptions, config: ModelConfig) -> None:
    """Check what can be known before an engine's process starts: its profile, and the sizes of its attention's heads.

    Raises:
        InputError: an unknown profile, one that the engine cannot follow, or heads that vLLM lacks on a CPU.
    """
    if options.profile is not None:
        try:
            chosen = find_profile(options.profile)
        except ValueError as error:
            raise InputError(f"--profile: {error}", "list the profiles with rlk-diff contract list") from None
        if options.engine != "reference":
            if not entry_points(group=GROUP, name=options.engine):
                raise InputError(_no_path(options), _NO_PATH)
            if not chosen.is_strict:
                raise InputError(
                    f"--profile {options.profile} describes an engine: {options.engine} has arithmetic of its own",
                    "choose a strict-v1 profile, or leave it out for a native run",
                )
    if options.engine == "vllm" and options.device == "cpu" and config.head_dim not in CPU_HEAD_SIZES:
        raise InputError(
            f"vllm: heads of {config.head_dim} elements: its attention on a CPU has {_listed(CPU_HEAD_SIZES)}",
            "compare megatron, transformers and reference, or use vLLM on a GPU",
        )


def _listed(sizes: Sequence[int]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"


def _no_path(options: EngineOptions) -> str:
    return f"{options.engine}: profile {options.profile!r} needs a strict path, and none is installed"


def _load(options: EngineOptions, kind: Any) -> Any | None:
    if options.profile is None:
        # A native run stays one, whatever the user's shell asks of plain vLLM.
        os.environ.pop(VARIABLE, None)
        return None
    for entry in entry_points(group=GROUP, name=options.engine):
        path = entry.load()
        needed = [name for base in kind.__mro__ for name in vars(base) if not name.startswith("_")]
        if missing := [name for name in needed if not callable(getattr(path, name, None))]:
            raise EngineError(
                f"{options.engine}: strict path {entry.value} has no {missing[0]}",
                f"it must offer what diffcheck.capture.strict.{kind.__name__} lists",
            )
        try:
            path.prepare(options.profile)
        except ValueError as error:
            raise InputError(f"{options.engine}: {error}", "see rlk-diff contract list") from None
        except RuntimeError as error:
            raise EngineError(f"{options.engine}: {error}", "see rlk-diff doctor") from None
        return path
    raise EngineError(_no_path(options), _NO_PATH)
