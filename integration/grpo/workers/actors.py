"""Engines as actors: objects with methods, in processes of their own.

An actor class is made from JSON options and has methods that take and return JSON. `ProcessActor` runs one in child
processes, one a tensor-parallel rank; whoever needs another place for it writes another class with the same methods.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from diffcheck.base.progress import silent
from diffcheck.base.serving import end, serve
from diffcheck.base.workers import Workers
from diffcheck.capture.plan import EngineOptions
from integration.grpo.config import GrpoConfig


class Actor(Protocol):
    """A live engine elsewhere."""

    def wait_ready(self) -> None:
        """Block until it is up; to be called once, before all else.

        Raises:
            RlkError: it could not start.
        """

    def start(self, method: str, **arguments: Any) -> None:
        """Begin a call; `result` waits for it. One call at a time."""

    def result(self) -> dict[str, Any]:
        """What the call returned.

        Raises:
            RlkError: as the method raised it.
            EngineDiedError: a process of the actor is gone.
        """

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """`start` and `result`."""

    @property
    def is_idle(self) -> bool:
        """Whether it lives and no call is in progress: then it can be kept when another actor has died."""

    def close(self, *, hurry: bool = False) -> None:
        """End it; ``hurry`` does not wait for the call in progress."""


class ProcessActor:
    """An actor in child processes, which end with this one however it ends.

    Args:
        name: for messages.
        module: has `main` of the actor's class under ``__main__``.
        ranks: processes; every rank runs every call, and rank 0 answers.
        log: file for what the engine prints.
    """

    def __init__(self, name: str, module: str, ranks: int, options: dict[str, Any], log: Path) -> None:
        self._workers = Workers(name, module, ranks, silent, log)
        self._workers.send({"open": options})
        self._is_busy = True

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return self._workers.pids

    @property
    def is_idle(self) -> bool:
        return not self._is_busy and self._workers.are_alive

    def wait_ready(self) -> None:
        self.result()

    def start(self, method: str, **arguments: Any) -> None:
        if self._is_busy:
            raise RuntimeError(f"{method}: a call is in progress, whose result nobody would get")
        self._is_busy = True
        self._workers.send({"call": method, "arguments": arguments})

    def result(self) -> dict[str, Any]:
        answer = self._workers.receive()
        self._is_busy = False
        return answer

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self.start(method, **arguments)
        return self.result()

    def close(self, *, hurry: bool = False) -> None:
        self._workers.close(hurry=hurry)


class _Served:
    """An actor's object behind requests ``{"call": method, "arguments": {...}}``."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] | None = getattr(self._actor, request["call"])(**request["arguments"])
        return {} if answer is None else answer

    def close(self) -> None:
        self._actor.close()


def main(make: Callable[[dict[str, Any]], Any]) -> None:
    """Run an actor in this process until its driver ends it, or ends."""
    serve(lambda options, _progress: _Served(make(options)))
    end()


def engine_options(engine: str, config: GrpoConfig, options: dict[str, Any], **own: Any) -> EngineOptions:
    """How both engines of a run are started; ``own`` are the fields that one of them needs besides."""
    return EngineOptions(
        engine=engine,
        model=Path(options["folder"]),
        dtype=config.dtype,
        tensor_parallel=config.tp,
        device=config.device,
        profile=config.followed,
        max_length=int(options["max_length"]),
        **own,
    )
