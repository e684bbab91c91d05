"""A mixture of experts made of the strict operators: what vLLM's block and Megatron-core's layer both compute.

In the order of the reference (`reference.models.qwen3`): logits, scores, choice, weights, each chosen expert on its own
rows, and one weighted sum. No engine's own dispatcher is used, for none keeps an expert's result apart from its weight.
The bits do not depend on which rows an expert is given together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffcheck.live_model.experts import ascending, by_token, weights_by_expert
from integration.backends import Operators

Tensor = Any
#: Shows one boundary of the block, named behind its prefix ("gate", "experts.3.act"), with a row for every token; gives
#: the tensor to go on with.
See = Callable[[str, Tensor], Tensor]
#: ``expert(e, rows, see)`` [rows, hidden] of one expert; ``see`` is shown "gate_proj", "up_proj", "act", "down_proj".
Expert = Callable[[int, Tensor, See], Tensor]


def use_renormalisation(own: Operators, renormalise: bool) -> None:
    """Whether weights are divided by their sum is a fact of the model, whatever the profile."""
    own.contracts["moe_router"] = own.contracts["moe_router"].override("order.renormalise", renormalise)


def mixture(
    own: Operators,
    x: Tensor,
    gate: Callable[[Tensor], Tensor],
    expert: Expert,
    experts_of: tuple[int, int],
    see: See | None,
) -> Tensor:
    """The block's output [tokens, hidden], of ``x`` [tokens, hidden].

    Args:
        gate: the router's logits [tokens, experts] of ``x``.
        experts_of: number of experts, and how many a token has.

    Raises:
        ValueError: a NaN logit, or ``see`` put a choice in that is none.
        BackendError: nothing computes a mixture of experts on that device.
    """
    number, k = experts_of
    show: See = see or (lambda _part, values: values)
    ranked, computed = own.moe_scores(show("gate", gate(x)))
    scores = show("scores", computed)
    if own.contracts["moe_router"].order.rank == "scores":
        ranked = scores
    chosen = _choice(own.moe_choice(ranked, k), number, show)
    weights = own.moe_weights(scores, chosen)
    if see is not None:
        weights = see("topk_weights", weights_by_expert(weights, chosen, number)).gather(1, chosen).contiguous()
    outputs = x.new_empty(x.shape[0], k, x.shape[1])
    for e in range(number):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        if token.numel() or see is not None:
            of_rows = _seen_by_row(show, f"experts.{e}", token, x.shape[0]) if see else show
            outputs[token, slot] = expert(e, of_rows("input", x[token]), of_rows)
    return own.moe_combine(outputs, weights, chosen)


def gated(own: Operators, joined: Tensor, see: See) -> Tensor:
    """silu(gate) * up of ``joined`` [rows, gate and up]."""
    gate, up = (part.contiguous() for part in joined.chunk(2, dim=-1))
    return see("act", own.swiglu(see("gate_proj", gate), see("up_proj", up)))


def _seen_by_row(see: See, prefix: str, token: Tensor, tokens: int) -> See:
    """Shows the rows of the tokens ``token`` as a row for every token: NaN where the expert has none."""

    def show(part: str, values: Tensor) -> Tensor:
        whole = by_token(values, token, tokens)
        seen = see(f"{prefix}.{part}", whole)
        return values if seen is whole else seen[token]

    return show


def _choice(experts: Tensor, number: int, see: See) -> Tensor:
    """The chosen experts [tokens, k], or what ``see`` made of them."""
    shown = ascending(experts)
    seen = see("topk_experts", shown)
    if seen is shown or seen.equal(shown):
        return experts
    ordered = seen.sort(dim=-1).values
    proper = (seen == seen.floor()) & (seen >= 0) & (seen < number)
    if not bool(proper.all()) or bool((ordered.diff(dim=-1) == 0).any()):
        raise ValueError(f"topk_experts: a replacement must be different experts from 0 to {number - 1}")
    changed = (seen != shown).any(dim=-1, keepdim=True)
    return seen.long().where(changed, experts)
