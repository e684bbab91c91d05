"""Where the actors of a run live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration.grpo.actors import ProcessActor
from integration.grpo.config import GrpoConfig
from integration.grpo.loop import Engines


def open_processes(
    config: GrpoConfig,
    options: dict[str, Any],
    logs: Path,
    *,
    rollout: str = "integration.grpo.rollout",
    trainer: str = "integration.grpo.trainer",
) -> Engines:
    """Each engine in child processes of this one; vLLM starts its own ranks, Megatron's are ours.

    Args:
        rollout, trainer: modules of the actors.
    """
    made = ProcessActor("vllm", rollout, 1, options, logs / "rollout.log")
    try:
        return Engines(made, ProcessActor("megatron", trainer, config.tp, options, logs / "trainer.log"))
    except BaseException:
        made.close(hurry=True)
        raise
