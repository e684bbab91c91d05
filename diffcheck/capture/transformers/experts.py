"""Where the boundaries of a mixture of experts live in transformers: inside two functions without modules of their own.

Router and experts are functions of tensors. They run as they are, under a mode that sees the products, the softmax and
nothing else pass by; which expert a product belongs to is told by the weight's address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from diffcheck.base.errors import EngineError
from diffcheck.capture.live import Taps
from diffcheck.capture.recorder import Recorder
from diffcheck.live_model.experts import ascending, by_token, function_mode, weights_by_expert
from diffcheck.rows import Rows

Tensor = Any


def tap_experts(taps: Taps, block: Any, name: str, recorder: Recorder, rows: Callable[[], Rows]) -> None:
    """Observe one sparse block.

    Args:
        block: the live module with ``gate`` and ``experts``. name: of its boundaries. rows: those of the forward that
            runs.
    """
    router = _Router(block.gate, name, recorder, rows)
    taps.attribute(block.gate, "forward", lambda forward: lambda *args, **kwargs: router.run(forward, *args, **kwargs))
    experts = _Experts(block.experts, name, recorder, rows)
    taps.attribute(
        block.experts, "forward", lambda forward: lambda *args, **kwargs: experts.run(forward, *args, **kwargs)
    )

    def combined(output: Tensor) -> Tensor:
        return experts.see("combine", output)

    taps.output(block.experts, combined)


class _Seen:
    """A part of the block ``name`` whose boundaries have a row for every token of the forward that runs."""

    def __init__(self, name: str, recorder: Recorder, rows: Callable[[], Rows]) -> None:
        self._name, self._recorder, self._rows = name, recorder, rows

    def see(self, part: str, tensor: Tensor) -> Tensor:
        changed = self._recorder.observe(f"{self._name}.{part}", self._rows(), tensor)
        return tensor if changed is None else changed


class _Router(_Seen):
    def __init__(self, gate: Any, name: str, recorder: Recorder, rows: Callable[[], Rows]) -> None:
        super().__init__(name, recorder, rows)
        self._gate = gate
        self._scores: Tensor | None = None

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with function_mode(self._pass):
            logits, weights, experts = forward(*args, **kwargs)
        experts, weights = self._choice(experts, weights)
        return logits, weights, experts

    def _pass(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch.nn import functional

        output = function(*args, **kwargs)
        if function is functional.linear:
            return self.see("gate", output)
        if function is functional.softmax:
            self._scores = self.see("scores", output)
            return self._scores
        return output

    def _choice(self, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        numbers = ascending(experts)
        seen = self.see("topk_experts", numbers)
        if seen is not numbers:
            assert self._scores is not None
            experts = seen.long()
            chosen = self._scores.gather(-1, experts)
            if self._gate.norm_topk_prob:
                chosen /= chosen.sum(dim=-1, keepdim=True)
            weights = chosen.to(weights.dtype)
        by_expert = weights_by_expert(weights, experts, self._gate.num_experts)
        return experts, self.see("topk_weights", by_expert).gather(1, experts).to(weights.dtype)


class _Experts(_Seen):
    def __init__(self, experts: Any, name: str, recorder: Recorder, rows: Callable[[], Rows]) -> None:
        super().__init__(name, recorder, rows)
        self._experts = experts
        self._number = int(experts.gate_up_proj.shape[0])
        self._where = {
            weight[e].data_ptr(): (kind, e)
            for kind, weight in (("gate_up", experts.gate_up_proj), ("down", experts.down_proj))
            for e in range(self._number)
        }
        self._chosen: Tensor | None = None
        self._hit: set[int] = set()

    def run(self, forward: Callable[..., Any], hidden: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        self._chosen, self._hit = chosen, set()
        with function_mode(self._pass):
            output = forward(hidden, chosen, weights)
        if self._hit != set(chosen.unique().tolist()):
            raise EngineError(
                f"{self._name}: products of experts {sorted(self._hit)} were seen, chosen were "
                f"{sorted(chosen.unique().tolist())}",
                "this release of transformers computes experts in a way that the adapter does not know",
            )
        nowhere = chosen.new_empty(0)
        for e in set(range(self._number)) - self._hit:
            for part, width in (
                ("input", hidden.shape[1]),
                *((x, self._experts.intermediate_dim) for x in ("gate_proj", "up_proj", "act")),
                ("down_proj", hidden.shape[1]),
            ):
                self._see_rows(f"experts.{e}.{part}", hidden.new_empty(0, width), nowhere)
        return output

    def _pass(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch
        from torch.nn import functional

        if function is not functional.linear:
            return function(*args, **kwargs)
        x, weight, *others = args
        kind, e = self._where[weight.data_ptr()]
        assert self._chosen is not None
        # As the experts' own code orders the rows: by place among the chosen, then by token.
        token = torch.where((self._chosen == e).T)[1]
        own = f"experts.{e}"
        if kind == "gate_up":
            self._hit.add(e)
            x = self._see_rows(f"{own}.input", x, token)
            parts = function(x, weight, *others, **kwargs).chunk(2, dim=-1)
            names = (f"{own}.gate_proj", f"{own}.up_proj")
            return torch.cat([self._see_rows(n, part, token) for n, part in zip(names, parts, strict=True)], dim=-1)
        x = self._see_rows(f"{own}.act", x, token)
        return self._see_rows(f"{own}.down_proj", function(x, weight, *others, **kwargs), token)

    def _see_rows(self, part: str, tensor: Tensor, token: Tensor) -> Tensor:
        """[tokens that chose the expert, width], as a row for every token."""
        if not self._recorder.wants(f"{self._name}.{part}"):
            return tensor
        whole = by_token(tensor, token, len(self._rows()))
        seen = self.see(part, whole)
        return tensor if seen is whole else seen[token]


def hf_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(Name as the checkpoint has it, parameter or a view of it): transformers 5 stacks experts' weights."""
    for name, parameter in model.named_parameters():
        owner, _, part = name.rpartition(".")
        if not owner.endswith(".mlp.experts"):
            yield name, parameter
        elif part == "gate_up_proj":
            for e, pair in enumerate(parameter):
                gate, up = pair.chunk(2, dim=0)
                yield f"{owner}.{e}.gate_proj.weight", gate
                yield f"{owner}.{e}.up_proj.weight", up
        else:
            for e, down in enumerate(parameter):
                yield f"{owner}.{e}.down_proj.weight", down
