"""Where the boundaries of a mixture of experts live in vLLM: a gate, a router, and one fused operator for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from diffcheck.base.boundaries import graph
from diffcheck.base.errors import EngineError
from diffcheck.capture.live import Taps
from diffcheck.live_model.experts import STRICT_SEE, ascending, tap_strict_experts, weights_by_expert

Tensor = Any
Module = Any
NO_SCORES = "vLLM's router on a CPU ranks the logits and takes the softmax of the chosen ones only"
FUSED = "one fused operator computes all experts and their sum"


def tap_experts(taps: Taps, live: Any, block: Module, prefix: str) -> None:
    """Observe one sparse block. ``live`` is the `Live` of the capture."""
    if hasattr(block, STRICT_SEE):

        def seen(name: str, values: Tensor) -> Tensor:
            return live.safely(lambda v: live.seen(name, v), values)

        tap_strict_experts(taps, block, prefix, live.recorder.wants, seen)
        taps.output(block, lambda out: seen(f"{prefix}.combine", out))
        return
    runner = block.experts
    router = getattr(runner, "router", None)
    if router is None or getattr(runner.routed_experts.quant_method, "is_monolithic", True):
        raise EngineError(
            f"{prefix}: vLLM routes inside {type(runner.routed_experts.quant_method).__name__}",
            "only experts whose router is a step of its own can be observed",
        )
    live.recorder.cannot_observe(f"{prefix}.scores", NO_SCORES)
    for boundary in graph(live.config, live.ranks):
        if boundary.name.startswith(f"{prefix}.experts."):
            live.recorder.cannot_observe(boundary.name, FUSED)
    taps.output(
        block.gate,
        lambda out: (
            live.safely(lambda o: (live.seen(f"{prefix}.gate", o[0]), *o[1:]), out)
            if isinstance(out, tuple)
            else live.safely(lambda o: live.seen(f"{prefix}.gate", o), out)
        ),
    )
    number = live.config.num_experts

    def routed(select: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            def show(output: Any) -> Any:
                weights, experts = output
                numbers = ascending(experts)
                if live.replaced(f"{prefix}.topk_experts", numbers) is not None:
                    raise EngineError(
                        f"{prefix}.topk_experts: a choice put into vLLM has no weights of its own",
                        "put other gate logits in, or change the other engine's choice",
                    )
                by_expert = weights_by_expert(weights, experts, number)
                changed = live.replaced(f"{prefix}.topk_weights", by_expert)
                if changed is not None:
                    weights = changed.gather(1, experts.long()).to(weights.dtype).contiguous()
                return weights, experts

            return live.safely(show, select(*args, **kwargs))

        return run

    taps.attribute(router, "select_experts", routed)
    taps.output(runner, lambda out: live.safely(lambda o: live.seen(f"{prefix}.combine", o), out))


def expert_weights(
    block: Module, prefix: str, gather: Callable[[Tensor], Sequence[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, weight) of a sparse block before vLLM packs it."""
    import torch

    yield f"{prefix}.gate.weight", block.gate.weight
    stacked = block.experts.routed_experts
    for e in range(int(stacked.w13_weight.shape[0])):
        for name, half in zip(("gate", "up"), stacked.w13_weight[e].chunk(2), strict=True):
            yield f"{prefix}.experts.{e}.{name}_proj.weight", torch.cat(list(gather(half.contiguous())))
        down = torch.cat(list(gather(stacked.w2_weight[e])), dim=1)
        yield f"{prefix}.experts.{e}.down_proj.weight", down
