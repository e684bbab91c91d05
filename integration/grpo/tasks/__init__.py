"""Tasks: where prompts come from and what a response is worth.

A task is a pure function of the run's seed and the step: the same step asks the same prompts after a resume, in any
process.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from diffcheck.base.errors import InputError
from reference.contract.names import offered
from reference.models.config import ModelConfig

#: Name -> module with a class ``Task``.
TASKS = {
    "tiny": "integration.grpo.tasks.tiny",
    "text": "integration.grpo.tasks.text",
    "jsonl": "integration.grpo.tasks.jsonl",
}


class Task(Protocol):
    """Prompts and rewards."""

    #: Tokens that end a response.
    stop_token_ids: tuple[int, ...]
    #: Tokens of the longest prompt it will ask.
    longest_prompt: int

    def prompts(self, step: int, count: int) -> list[tuple[int, ...]]:
        """Token ids of the ``count`` prompts of ``step`` (from 1)."""

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        """What a response is worth; finite. Token ids, a stop token that ended it included."""

    def loss_mask(self, prompt: Sequence[int], response: Sequence[int]) -> list[int] | None:
        """1 for each token of the response that is learned from, 0 for the others; None learns from all."""


def open_task(name: str, folder: Path, config: ModelConfig, seed: int, options: Mapping[str, Any]) -> Task:
    """The task ``name`` for a model.

    Args:
        folder: of the model; its tokenizer, where the task needs one.
        options: keyword arguments of the task.

    Raises:
        InputError: an unknown task or option, or one that does not fit the model.
    """
    if name not in TASKS:
        raise InputError(f"task {name!r} is unknown", offered(name, TASKS))
    make = importlib.import_module(TASKS[name]).Task
    try:
        task: Task = make(folder, config, seed, **options)
    except TypeError as error:
        raise InputError(f"task {name}: {error}", "see docs/grpo.md for the options of each task") from None
    return task
