"""Megatron-core's MoE layer with the strict operators inside. The parameters of its router and experts are kept; its
dispatcher, which adds weighted results in the order of arrival, is not called.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from integration.experts import See, gated, mixture
from integration.megatron import functions, modules

Tensor = Any


class StrictRouter(TopKRouter):  # type: ignore[misc]
    """The router's weight; what is made of its logits is the layer's affair."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits [..., experts]."""
        own = modules.operators_of(self.config)
        return functions.Linear.apply(own, input, self.weight, None, "linear", None)

    def routing(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Megatron's own choice of experts has no strict contract")


class StrictMoELayer(MoELayer):  # type: ignore[misc]
    """Experts one after the other, each on the rows of its tokens, and one weighted sum. Forward only."""

    rlk_see: See | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        if any(value is not None for value in options.values()):
            raise TypeError(f"{', '.join(options)} of a mixture of experts has no strict path yet")
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise TypeError("gradients of a mixture of experts have no strict contract yet (docs/moe.md)")
        own = modules.operators_of(self.config)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        sizes = int(self.config.num_moe_experts), int(self.router.topk)
        y = mixture(own, x, self.router.gating, self._expert, sizes, self.rlk_see)
        return y.reshape(hidden_states.shape), None

    def _expert(self, e: int, rows: Tensor, see: See) -> Tensor:
        mlp = self.experts.local_experts[e]
        joined, _ = mlp.linear_fc1(rows)
        output, _ = mlp.linear_fc2(gated(modules.operators_of(self.config), joined, see))
        return see("down_proj", output)


def specification(mlp: Any) -> Any:
    """The specification of a strict sparse layer; ``mlp`` is that of the dense ones."""
    native = get_moe_module_spec(use_te=False, num_experts=1)
    parts = MLPSubmodules(linear_fc1=mlp.linear_fc1, linear_fc2=mlp.linear_fc2)
    experts = ModuleSpec(module=SequentialMLP, submodules=parts)
    submodules = dataclasses.replace(native.submodules, experts=experts, router=StrictRouter)
    return ModuleSpec(module=StrictMoELayer, submodules=submodules, metainfo=native.metainfo)


def unknown_settings(config: Any) -> dict[str, Any]:
    """Settings of a mixture of experts that have no strict contract -> whether ``config`` has them on."""
    return {
        "expert_model_parallel_size": config.expert_model_parallel_size > 1,
        "tensor_model_parallel_size with experts": config.tensor_model_parallel_size > 1,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "moe_router_score_function": config.moe_router_score_function != "softmax",
        "moe_router_enable_expert_bias": config.moe_router_enable_expert_bias,
        "moe_router_num_groups": config.moe_router_num_groups,
        "moe_router_topk_scaling_factor": config.moe_router_topk_scaling_factor,
        "moe_router_dtype": config.moe_router_dtype,
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor,
        "moe_input_jitter_eps": config.moe_input_jitter_eps,
        "moe_apply_probs_on_input": config.moe_apply_probs_on_input,
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type != "none",
        "add_bias_linear with experts": config.add_bias_linear,
    }
