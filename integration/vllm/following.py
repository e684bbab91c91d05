"""What a live vLLM worker did since it was last asked: run by `collective_rpc` in each worker, of a strict engine or a
native one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from diffcheck.capture.vllm.evidence import engine_evidence
from integration.vllm.state import PROFILE

#: Attribute of a worker: counts by name.
FACTS = "rlk_facts"


def follow(worker: Any) -> None:
    """Count what the scheduler asks of this worker, from now on."""
    runner = worker.model_runner
    original: Callable[..., Any] = runner.execute_model
    forward: Callable[..., Any] = runner._model_forward
    count_replays()

    def model_forward(*args: Any, **kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        mode, before = get_forward_context().cudagraph_runtime_mode.name, replays()
        output = forward(*args, **kwargs)
        facts = getattr(worker, FACTS)
        for name, count in ((f"graph_forwards_{mode}", 1), (f"graph_replays_{mode}", replays() - before)):
            facts[name] = facts.get(name, 0) + count
        return output

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        facts = getattr(worker, FACTS)
        if scheduled.total_num_scheduled_tokens:
            facts["forwards"] += 1
            facts["tokens"] += scheduled.total_num_scheduled_tokens
            facts["requests_at_once"] = max(facts["requests_at_once"], len(scheduled.num_scheduled_tokens))
            facts["prefix_cache_hits"] += sum(new.num_computed_tokens for new in scheduled.scheduled_new_reqs)
            facts["prefill_chunks"] += chunks(runner, scheduled)
        facts["preemptions"] += len(scheduled.preempted_req_ids or ())
        return original(scheduled, *args, **kwargs)

    runner.execute_model = execute_model
    runner._model_forward = model_forward
    _clear(worker)


def chunks(runner: Any, scheduled: Any) -> int:
    """Requests of which this forward computes a part of the prompt that leaves another part for later."""
    lengths = {new.req_id: len(new.prompt_token_ids) for new in scheduled.scheduled_new_reqs}
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    cached = scheduled.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for name in cached.req_ids:
        lengths[name] = len(runner.requests[name].prompt_token_ids)
    return sum(computed[name] + count < lengths[name] for name, count in scheduled.num_scheduled_tokens.items())


def count_replays() -> None:
    """Count every replay of a CUDA graph in this process from now on, where it happens: in `torch.cuda.CUDAGraph`."""
    import torch

    original = torch.cuda.CUDAGraph.replay
    if hasattr(original, "rlk_count"):
        return

    def replay(self: Any) -> Any:
        replay.rlk_count += 1  # type: ignore[attr-defined]
        return original(self)

    replay.rlk_count = 0  # type: ignore[attr-defined]
    torch.cuda.CUDAGraph.replay = replay


def replays() -> int:
    """CUDA graphs replayed since `count_replays`."""
    import torch

    return int(torch.cuda.CUDAGraph.replay.rlk_count)


def graphs_run(facts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Graph mode of vLLM -> forwards that were dispatched to it, and CUDA graphs that really were replayed in them."""
    modes = sorted({name.rpartition("_")[2] for name in facts if name.startswith("graph_forwards_")})
    return {
        mode: {"forwards": facts[f"graph_forwards_{mode}"], "replays": facts[f"graph_replays_{mode}"]} for mode in modes
    }


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
    names = ("forwards", "tokens", "requests_at_once", "prefix_cache_hits", "prefill_chunks", "preemptions")
    setattr(worker, FACTS, dict.fromkeys(names, 0))
