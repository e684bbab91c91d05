"""A live engine as the changes see it, and how a change is found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.base.models import resolve_model
from diffcheck.base.progress import Progress
from diffcheck.capture.live import Checkpoint, torch_dtype
from diffcheck.capture.megatron.weights import to_megatron
from diffcheck.capture.plan import CapturePlan, EngineOptions
from diffcheck.capture.strict import strict_path
from reference.models.config import ModelConfig

Tensor = Any


@dataclass(frozen=True)
class Change:
    """One change as data: ``module.function`` of this package and its arguments."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> list[Any]:
        return [self.name, self.arguments]


@dataclass
class Live:
    """A live engine of this process, and the plan it is about to run."""

    adapter: Any
    plan: CapturePlan
    progress: Progress

    @property
    def options(self) -> EngineOptions:
        options: EngineOptions = self.adapter.options
        return options

    @property
    def config(self) -> ModelConfig:
        config: ModelConfig = self.adapter.config
        return config

    @cached_property
    def runner(self) -> Any:
        """vLLM's model runner. It lives in this process as long as there is one rank."""
        return self.adapter.llm.collective_rpc(lambda worker: worker.model_runner)[0]

    @cached_property
    def model(self) -> Any:
        """The live torch module."""
        return self.runner.get_model() if self.options.engine == "vllm" else self.adapter.model

    @cached_property
    def operators(self) -> Any:
        """What a strict engine computes with.

        Raises:
            InputError: the engine is a native one.
        """
        path = strict_path(self.options)
        if path is None:
            raise InputError(f"{self.options.engine} runs natively: it follows no contract", "give it a strict profile")
        return path.live_operators(self.model)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model folder's weights in the engine's dtype."""
        folder, _ = resolve_model(str(self.options.model))
        return Checkpoint(folder, torch_dtype(self.options))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load (HF name, weight) into the live engine as its users do; weights not named stay as they are."""
        given = dict(weights)
        if self.options.engine == "vllm":
            from diffcheck.capture.vllm.loader import fused_with

            # A module is filled anew as a whole.
            whole = set().union(*map(fused_with, given))
            self.send([(name, given.get(name, self.checkpoint[name])) for name in self.checkpoint if name in whole])
            return
        import torch

        live = dict(self.model.named_parameters())
        shards = to_megatron(
            {**dict(self.adapter.hf_weights()), **given},
            self.config,
            padded_vocab=self.adapter.padded_vocab,
            ranks=self.options.tensor_parallel,
            rank=self.adapter.rank,
        )
        with torch.no_grad():
            for name, value in list(shards):
                live[name].copy_(value)

    def send(self, weights: list[tuple[str, Tensor]]) -> None:
        """vLLM's own reload of exactly these weights."""
        self.adapter.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})


def find(name: str) -> Callable[..., AbstractContextManager[None]]:
    """The change ``module.function``."""
    module, _, function = name.partition(".")
    change: Callable[..., AbstractContextManager[None]]
    change = getattr(importlib.import_module(f"diffcheck.faults.changes.{module}"), function)
    return change
