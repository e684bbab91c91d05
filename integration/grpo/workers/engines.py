"""Where the actors of a run live: by default in child processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from integration.grpo.config import GrpoConfig
from integration.grpo.workers.actors import Actor, ProcessActor

Role = Literal["rollout", "trainer"]
ROLES: tuple[Role, ...] = ("trainer", "rollout")
#: Starts the actor of a role: (role, configuration, options of its class, folder for logs).
OpenEngine = Callable[[Role, GrpoConfig, dict[str, Any], Path], Actor]


def open_process(
    role: Role,
    config: GrpoConfig,
    options: dict[str, Any],
    logs: Path,
    *,
    rollout: str = "integration.grpo.workers.rollout",
    trainer: str = "integration.grpo.workers.trainer",
) -> Actor:
    """An engine in child processes of this one; vLLM starts its own ranks, Megatron's are ours.

    Args:
        rollout, trainer: modules of the actors.
    """
    if role == "rollout":
        return ProcessActor("vllm", rollout, 1, options, logs / "rollout.log")
    return ProcessActor("megatron", trainer, config.tp, options, logs / "trainer.log")
