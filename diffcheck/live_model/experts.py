"""What the engines' adapters share about mixtures of experts: rows by expert, choices as numbers, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffcheck.base.errors import InputError
from reference.models.config import ModelConfig

Tensor = Any
#: Shows one boundary, [tokens, width]; gives the tensor to go on with.
See = Callable[[str, Tensor], Tensor]
#: Attribute of a strict path's sparse block: while a capture looks, a function (part of the boundary's name behind the
#: block's, tensor with a row for every token) -> tensor to go on with; else None.
STRICT_SEE = "rlk_see"


def check_experts(config: ModelConfig, engine: str, tensor_parallel: int) -> None:
    """Raises:
    InputError: the model is a mixture of experts and something is asked that this engine does not do with one.
    """
    if not config.num_experts:
        return
    if tensor_parallel != 1:
        raise InputError(
            f"{engine}: tensor parallelism {tensor_parallel} of a mixture of experts is not observed",
            "use --tp 1 (docs/moe.md)",
        )


def tap_strict_experts(taps: Any, block: Any, name: str, wants: Callable[[str], bool], see: See) -> None:
    """Observe one sparse block of a strict path, all but its sum, which is the block's output.

    Args:
        name: of the block. wants: whether a boundary is to be recorded.
    """

    def shown(part: str, values: Tensor) -> Tensor:
        boundary = f"{name}.{part}"
        return see(boundary, values) if wants(boundary) else values

    taps.attribute(block, STRICT_SEE, lambda _none: shown)


def function_mode(handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """A context in which ``handler(function, args, kwargs)`` stands for every call of a function of tensors: it calls
    the function itself, and may look at what goes in and comes out.
    """
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handler(function, args, kwargs or {})

    return Mode()


def by_token(values: Tensor, token: Tensor, tokens: int) -> Tensor:
    """``values`` [chosen, width] of the tokens ``token`` [chosen], as a row for every token: NaN where it has none."""
    whole = values.new_full((tokens, *values.shape[1:]), float("nan"))
    whole[token] = values
    return whole


def weights_by_expert(weights: Tensor, experts: Tensor, number: int) -> Tensor:
    """Weights [tokens, k] of ``experts`` [tokens, k] as a column for every expert, NaN where it was not chosen; in
    float32, which holds every narrower weight exactly.
    """
    whole = weights.new_full((weights.shape[0], number), float("nan")).float()
    return whole.scatter_(1, experts.long(), weights.float())


def ascending(experts: Tensor) -> Tensor:
    """Chosen experts [tokens, k] as ascending whole numbers in float32: the choice, in whatever order it was made."""
    return experts.sort(dim=-1).values.float()
