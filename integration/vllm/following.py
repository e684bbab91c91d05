"""What a live vLLM worker did since it was last asked: run by `collective_rpc` in each worker, of a strict engine or a
native one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from diffcheck.capture.vllm.evidence import engine_evidence
from integration.vllm.state import PROFILE

#: Attribute of a worker: counts by name.
FACTS = "rlk_facts"


def follow(worker: Any) -> None:
    """Count what the scheduler asks of this worker, from now on."""
    original: Callable[..., Any] = worker.model_runner.execute_model

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        facts = getattr(worker, FACTS)
        if scheduled.total_num_scheduled_tokens:
            facts["forwards"] += 1
            facts["tokens"] += scheduled.total_num_scheduled_tokens
            facts["requests_at_once"] = max(facts["requests_at_once"], len(scheduled.num_scheduled_tokens))
            facts["prefix_cache_hits"] += sum(new.num_computed_tokens for new in scheduled.scheduled_new_reqs)
        facts["preemptions"] += len(scheduled.preempted_req_ids or ())
        return original(scheduled, *args, **kwargs)

    worker.model_runner.execute_model = execute_model
    _clear(worker)


def begin(worker: Any) -> None:
    """Count from zero, and check that every module of a strict worker is ours.

    Raises:
        RuntimeError: the strict path is not in place.
    """
    _clear(worker)
    if os.environ.get(PROFILE):
        from integration.vllm import plugin

        runner = worker.model_runner
        plugin.begin(runner, runner.get_model())


def finish(worker: Any) -> dict[str, Any]:
    """Counts since `begin`; of a strict worker with operators, contracts and patches.

    Raises:
        RuntimeError: an operator ran less often than the forwards need.
    """
    facts = {"scheduler": dict(getattr(worker, FACTS))}
    if os.environ.get(PROFILE):
        from integration.vllm import plugin

        layers = worker.model_runner.model_config.hf_config.num_hidden_layers
        facts |= plugin.evidence(layers, facts["scheduler"]["forwards"])
    return facts


def describe(worker: Any) -> dict[str, Any]:
    """Backends, layouts and switches of this worker."""
    return engine_evidence(worker.model_runner, worker.model_runner.get_model())


def _clear(worker: Any) -> None:
    names = ("forwards", "tokens", "requests_at_once", "prefix_cache_hits", "preemptions")
    setattr(worker, FACTS, dict.fromkeys(names, 0))
