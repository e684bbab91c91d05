"""vLLM's sparse block with the strict operators inside. Its gate, its router's settings and its experts' weights are
kept; its fused operator is not called.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from integration.experts import See, gated, mixture, use_renormalisation
from integration.vllm.layers import StrictLinearMethod, use_strict_method
from integration.vllm.state import on_gpu, operators

Tensor = Any
#: The stacked weights of a block's experts: gate and up one below the other, and down.
STACKED = ("w13_weight", "w2_weight")


class StrictExpertsMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Keeps the weights of all experts as the arrays that the products read, and gives the tensors up."""

    def process_weights_after_loading(self, layer: Any) -> None:
        own = operators(layer.w13_weight.dtype)
        layer.rlk_dtype = layer.w13_weight.dtype
        layer.rlk_stacked = {name: [own.weight(weight) for weight in getattr(layer, name)] for name in STACKED}
        for name in STACKED:
            setattr(layer, name, torch.nn.Parameter(getattr(layer, name).new_empty(0), requires_grad=False))

    def apply(self, *_: Any, **__: Any) -> Any:
        raise TypeError("vLLM's fused experts have no strict contract")


def strict_block(native: Any) -> Any:
    """A class in place of ``native``, which is vLLM's sparse block of Qwen3-MoE."""

    class StrictSparseMoeBlock(native):  # type: ignore[misc]
        rlk_see: See | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            routed, router = self.experts.routed_experts, self.experts.router
            unknown = {
                "a GPU": on_gpu(),
                "expert or tensor parallelism": self.ep_size > 1 or self.tp_size > 1,
                "sequence parallelism": self.is_sequence_parallel,
                "shared experts": self.shared_expert is not None,
                "load balancing": self.enable_eplb,
                type(router).__name__: type(router) is not CPURouter,
                **(_unknown_routing(router) if type(router) is CPURouter else {}),
                type(routed.quant_method).__name__: type(routed.quant_method) is not UnquantizedFusedMoEMethod,
            }
            if any(unknown.values()):
                what = ", ".join(name for name, on in unknown.items() if on)
                raise TypeError(f"a mixture of experts with {what} has no strict path in vLLM (docs/moe.md)")
            use_strict_method(self.gate)
            # Its constructor has made and registered the weights already.
            routed.quant_method.__class__ = StrictExpertsMethod
            use_renormalisation(operators(routed.w13_weight.dtype), bool(router.renormalize))

        def forward(self, hidden_states: Tensor) -> Tensor:
            routed = self.experts.routed_experts
            own = operators(routed.rlk_dtype)
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            gate = partial(self.gate.quant_method.apply, self.gate)
            sizes = self.n_routed_experts, int(self.experts.router.top_k)
            return mixture(own, x, gate, self._expert, sizes, self.rlk_see).reshape(hidden_states.shape)

        def _expert(self, e: int, rows: Tensor, see: See) -> Tensor:
            stacked = self.experts.routed_experts.rlk_stacked
            own = operators(rows.dtype)
            act = gated(own, own.linear(rows, stacked["w13_weight"][e]), see)
            return see("down_proj", own.row_linear(act, stacked["w2_weight"][e]))

    return StrictSparseMoeBlock


def _unknown_routing(router: Any) -> dict[str, bool]:
    """Ways to route that have no strict contract -> whether ``router`` goes them."""
    return {
        f"scores by {router.scoring_func}": router.scoring_func != "softmax",
        "groups of experts": bool(router.use_grouped_topk),
        f"weights scaled by {router.routed_scaling_factor}": router.routed_scaling_factor != 1.0,
        "a correction bias": router.e_score_correction_bias is not None,
        "a routing function of its own": router.custom_routing_function is not None,
    }


def is_strict(block: Any) -> bool:
    """Whether a live sparse block computes with the strict operators, in every part."""
    return (
        hasattr(block, "rlk_see")
        and type(block.gate.quant_method) is StrictLinearMethod
        and type(block.experts.routed_experts.quant_method) is StrictExpertsMethod
    )
