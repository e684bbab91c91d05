"""One vLLM for all tests here that can share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.grpo.config import GrpoConfig
from integration.grpo.workers.actors import Actor, ProcessActor
from integration.grpo.workers.engines import Role, open_process


class Kept:
    """An actor that outlives the run that it serves, unless that run left it in the middle of a call."""

    def __init__(self, actor: ProcessActor) -> None:
        self.actor = actor

    def wait_ready(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor, name)

    def close(self, *, hurry: bool = False) -> None:
        if not self.actor.is_idle:
            self.actor.close(hurry=hurry)


class SharedEngines:
    """Starts engines as a run does, but one vLLM only; ``trainer`` is the module of the next trainers."""

    def __init__(self) -> None:
        self.trainer = "integration.grpo.workers.trainer"
        self.latest: dict[Role, ProcessActor] = {}
        self.started: list[Role] = []

    def open(self, role: Role, config: GrpoConfig, options: dict[str, Any], logs: Path) -> Actor:
        if role == "rollout" and "rollout" in self.latest and self.latest["rollout"].is_idle:
            return Kept(self.latest["rollout"])
        modules = {"rollout": "tests.integration.grpo.faulty_rollout", "trainer": self.trainer}
        actor = open_process(role, config, options, logs, **modules)
        assert isinstance(actor, ProcessActor)
        self.latest[role] = actor
        self.started.append(role)
        if role == "trainer":
            return actor
        actor.wait_ready()
        return Kept(actor)


@pytest.fixture(scope="session")
def engines() -> Iterator[SharedEngines]:
    shared = SharedEngines()
    yield shared
    if "rollout" in shared.latest:
        shared.latest["rollout"].close()
