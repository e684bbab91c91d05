"""Where the boundaries of a mixture of experts live in Megatron-core: a router, and one MLP module for each expert.

Megatron multiplies an expert's activation by its weight before the down projection, where vLLM and transformers weigh
its result: an unweighted down projection does not exist here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffcheck.base.errors import EngineError
from diffcheck.capture.live import Taps
from diffcheck.capture.recorder import Recorder
from diffcheck.live_model.experts import See, by_token, function_mode

Tensor = Any
NO_DOWN = "Megatron-core weighs the activation before the down projection: the unweighted result is never computed"
NO_SCORES = "this router takes the softmax of the chosen logits only: there are no scores of all experts"


def tap_experts(taps: Taps, block: Any, name: str, recorder: Recorder, see: See) -> None:
    """Observe one ``MoELayer`` with a `SequentialMLP`.

    Args:
        see: shows a boundary of as many rows as the forward that runs has tokens.
    """
    _Block(taps, block, name, recorder, see)


class _Block:
    def __init__(self, taps: Taps, block: Any, name: str, recorder: Recorder, see: See) -> None:
        self._recorder, self._name, self._see = recorder, name, see
        self._router = block.router
        self._map: Tensor = None
        number = int(block.router.weight.shape[0])
        for e in range(number):
            recorder.cannot_observe(f"{name}.experts.{e}.down_proj", NO_DOWN)
        if not block.router.config.moe_router_pre_softmax:
            recorder.cannot_observe(f"{name}.scores", NO_SCORES)
        taps.attribute(block.router, "gating", self._gating)
        taps.attribute(block.router, "routing", self._routing)
        experts = block.experts.local_experts
        if len(experts) != number:
            raise EngineError(f"{name}: {len(experts)} experts on this rank of {number}", "use one rank")
        for e, expert in enumerate(experts):
            self._tap_expert(taps, expert, e)

    def _gating(self, gating: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: self._shown("gate", gating(x))

    def _routing(self, routing: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def run(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            def passing(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                output = function(*args, **kwargs)
                if function is not torch.softmax or not self._router.config.moe_router_pre_softmax:
                    return output
                # The router narrows its scores to the logits' format before it ranks them: that is what they are.
                return self._shown("scores", output.type_as(args[0]))

            with function_mode(passing):
                probabilities, chosen = routing(logits, *args, **kwargs)
            k = int(self._router.topk)
            if not bool((chosen.sum(dim=-1) == k).all()):
                raise EngineError(
                    f"{self._name}: a token has other than {k} experts", "token dropping is not supported"
                )
            experts = chosen.nonzero()[:, 1].view(-1, k)
            as_numbers = experts.float()
            seen = self._shown("topk_experts", as_numbers)
            if seen is not as_numbers:
                probabilities, chosen = self._chosen_anew(logits, seen.long())
            weights = probabilities.float().masked_fill(~chosen, float("nan"))
            seen = self._shown("topk_weights", weights)
            if seen is not weights:
                probabilities = seen.masked_fill(~chosen, 0).to(probabilities.dtype)
            self._map = chosen
            return probabilities, chosen

        return run

    def _chosen_anew(self, logits: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """What the router gives for another choice: its own formula on the logits of those experts."""
        import torch

        flat = logits.reshape(-1, logits.shape[-1])
        if self._router.config.moe_router_pre_softmax:
            weights = torch.softmax(flat, dim=-1, dtype=torch.float32).type_as(flat).gather(1, experts)
        else:
            weights = torch.softmax(flat.gather(1, experts), dim=-1, dtype=torch.float32).type_as(flat)
        chosen = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, experts, True)
        return torch.zeros_like(flat).scatter_(1, experts, weights), chosen

    def _tap_expert(self, taps: Taps, expert: Any, e: int) -> None:
        own = f"experts.{e}"
        parts = (f"{own}.gate_proj", f"{own}.up_proj")

        def products(output: Any) -> Any:
            import torch

            joined, bias = output
            halves = joined.chunk(2, dim=-1)
            seen = [self._rows(part, half, e) for part, half in zip(parts, halves, strict=True)]
            unchanged = all(a is b for a, b in zip(seen, halves, strict=True))
            return output if unchanged else (torch.cat(seen, dim=-1), bias)

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return (self._rows(f"{own}.input", args[0], e), *args[1:]), kwargs

        taps.input(expert, enter)
        taps.output(expert.linear_fc1, products)
        taps.attribute(expert, "forward", lambda forward: self._seeing_act(forward, f"{own}.act", e))

    def _seeing_act(self, forward: Callable[..., Any], part: str, e: int) -> Callable[..., Any]:
        """The gated product is the first multiplication inside ``MLP.forward``; that by the weight is the second."""

        def run(*args: Any, **kwargs: Any) -> Any:
            import torch

            products = (torch.Tensor.mul, torch.Tensor.__mul__, torch.mul)
            found: list[bool] = []

            def passing(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                output = function(*args, **kwargs)
                if function not in products or found:
                    return output
                found.append(True)
                return self._rows(part, output, e)

            with function_mode(passing):
                output = forward(*args, **kwargs)
            if not found:
                raise EngineError(
                    f"{self._name}.{part}: no gated product was seen", "this release computes it otherwise"
                )
            return output

        return run

    def _rows(self, part: str, values: Tensor, e: int) -> Tensor:
        if not self._recorder.wants(f"{self._name}.{part}"):
            return values
        # The dispatcher permutes by expert, and within one keeps the order of tokens.
        token = self._map[:, e].nonzero()[:, 0]
        whole = by_token(values, token, self._map.shape[0])
        seen = self._shown(part, whole)
        return values if seen is whole else seen[token]

    def _shown(self, part: str, tensor: Tensor) -> Tensor:
        """[tokens, width], or [sequence, batch, width]."""
        flat = tensor.reshape(-1, tensor.shape[-1])
        seen = self._see(f"{self._name}.{part}", flat)
        return tensor if seen is flat else seen.reshape(tensor.shape)
