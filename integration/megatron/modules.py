"""Megatron-core's modules made of the reference operators. Activations are [sequence, batch, features].

The operators of a model travel with its configuration, as attribute `OPERATORS`: Megatron hands the configuration to
every module and function that needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP

from integration.backends import Operators
from integration.megatron import functions

Tensor = Any
OPERATORS = "rlk_operators"


def operators_of(config: Any) -> Operators:
    """The operators of the model that ``config`` belongs to.

    Raises:
        RuntimeError: the model was not built for a strict profile.
    """
    own = getattr(config, OPERATORS, None)
    if own is None:
        raise RuntimeError("this configuration has no strict profile: build the model with the strict specification")
    return own  # type: ignore[no-any-return]


def _group(module: Any) -> Any:
    """The module's tensor-parallel group, or None for a group of one."""
    return None if module.tp_group is None or module.tp_group.size() == 1 else module.tp_group


class StrictNorm(torch.nn.Module):  # type: ignore[misc]
    """RMSNorm of hidden states."""

    _heads = False

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        self._own = operators_of(config)
        #: The ranks that share the heads.
        self._group = None
        if self._heads and config.tensor_model_parallel_size > 1:
            self._group = parallel_state.get_tensor_model_parallel_group()

    def forward(self, x: Tensor) -> Tensor:
        return functions.RmsNorm.apply(self._own, x, self.weight, self.eps, self._heads, self._group)


class StrictHeadNorm(StrictNorm):
    """RMSNorm of query or key heads [sequence, batch, heads, head_dim]."""

    _heads = True


class StrictColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """q, k, v or gate, up of this rank."""

    _kind = "linear"
    #: How many projections the weight holds one below the other.
    joined = 1

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        own, group = operators_of(self.config), _group(self)
        return functions.Linear.apply(own, input, weight, bias, self._kind, group, self.joined)


class StrictOutputLayer(StrictColumnParallelLinear):
    """Logits in float32."""

    _kind = "lm_head"


class StrictRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """o_proj and down_proj: partial sums are gathered and merged; the bias joins before the rounding."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **_: Any) -> Tensor:
        return functions.Linear.apply(operators_of(self.config), input, weight, None, "row", _group(self))

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        if not self.input_is_parallel or self.sequence_parallel:
            raise TypeError("this form of row parallelism has no strict contract")
        partial = self._forward_impl(input=input_, weight=self.weight)
        return functions.MergeRanks.apply(operators_of(self.config), partial, self.bias, _group(self)), None


class StrictCoreAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal attention; keys and values are in the cache's format by contract."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()
        if attn_mask_type != AttnMaskType.causal or config.attention_dropout:
            raise TypeError("attention that is not causal, or with dropout, has no strict contract")
        self._own = operators_of(config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any) -> Tensor:
        if options.get("packed_seq_params") is not None or options.get("attention_bias") is not None:
            raise TypeError("packed sequences and attention biases have no strict path yet")
        return functions.Attention.apply(self._own, query, key, value).flatten(2)


class StrictMLP(MLP):  # type: ignore[misc]
    """SwiGLU MLP."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.linear_fc1.joined = 2

    def forward(self, hidden_states: Tensor, per_token_scale: Any = None, **_: Any) -> tuple[Tensor, None]:
        joined, bias = self.linear_fc1(hidden_states)
        if bias is not None or per_token_scale is not None:
            raise TypeError("an MLP with a bias, or of an expert, has no strict contract")
        gate, up = joined.chunk(2, dim=-1)
        output, _ = self.linear_fc2(functions.Swiglu.apply(operators_of(self.config), gate, up))
        return output, None


class StrictEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Rows of the table; with several ranks those of the rank that owns the token."""

    def forward(self, input_: Tensor) -> Tensor:
        own, group, mine = getattr(self, OPERATORS), _group(self), None
        if group is not None:
            mine = (input_ >= self.vocab_start_index) & (input_ < self.vocab_end_index)
            input_ = torch.where(mine, input_ - self.vocab_start_index, 0)
        return functions.Embedding.apply(own, input_, self.weight, mine, group)


def bias_dropout_add(own: Operators) -> Callable[..., Any]:
    """Megatron's residual add, as its layers ask for it: ``get(training, fused)`` gives the function."""

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        if bias is not None or prob:
            raise TypeError("a bias or dropout after the projection has no strict contract")
        return functions.ResidualAdd.apply(own, x, residual)

    return lambda training, fused: add


def strict_rope(native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's RoPE function; models without a strict profile keep ``native``."""

    def apply(
        t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Any = None, mscale: float = 1.0, **rest: Any
    ) -> Tensor:
        own = getattr(config, OPERATORS, None)
        if own is None:
            return native(t, freqs, config, cu_seqlens=cu_seqlens, mscale=mscale, **rest)
        if cu_seqlens is not None or mscale != 1.0 or config.rotary_interleaved:
            raise TypeError("packed, scaled or interleaved RoPE has no strict path yet")
        # The first inverse frequency is theta ** 0 = 1, so the first angle is the position.
        positions = freqs[:, 0, 0, 0].long()
        length, batch, heads, dim = t.shape
        rows = positions[:, None].expand(length, batch).reshape(-1)
        rotated = functions.Rope.apply(own, t.reshape(-1, heads, dim), rows, config.rlk_theta, freqs.shape[0])
        return rotated.reshape(length, batch, heads, dim)

    return apply
