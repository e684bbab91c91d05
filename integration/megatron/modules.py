"""Megatron-core's modules made of the reference operators. Activations are [sequence, batch, features].

The operators of a model travel with its configuration, as attribute `OPERATORS`: Megatron hands the configuration to
every module and function that needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import is_layer_window_attention

from integration.backends import Operators
from integration.megatron import functions
from reference.primitives import RopeParameters, table_of_angles

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
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        #: As Megatron's: (earlier keys, later keys) of a query, or None.
        self.window_size = config.window_size if windowed else None
        if self.window_size is not None and self.window_size[1] != 0:
            raise TypeError("a window over later keys has no strict contract")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any) -> Tensor:
        if options.get("packed_seq_params") is not None or options.get("attention_bias") is not None:
            raise TypeError("packed sequences and attention biases have no strict path yet")
        window = None if self.window_size is None else self.window_size[0] + 1
        return functions.Attention.apply(self._own, query, key, value, window).flatten(2)


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


class LiveRope:
    """The angles that the model's rotary embedding gave when it was built, to notice that somebody changed it since.

    The strict table is the specification's, made from the parameters; an embedding that was changed while it lived is
    obeyed instead, for a change that shows in no bit would be one that nobody can find.
    """

    def __init__(self, rotary: Any, theta: float | RopeParameters) -> None:
        rope = theta if isinstance(theta, RopeParameters) else RopeParameters(theta)
        self._factor = rope.factor if rope.kind == "linear" else 1.0
        self._mscale = np.float32(rope.attention_factor)
        # Linear scaling divides positions before they meet the frequencies; the other kinds scale the frequencies.
        angles = rotary.get_emb(2)
        angles = angles[0] if isinstance(angles, tuple) else angles
        row = angles[1, 0, 0, : angles.shape[-1] // 2]
        #: Frequencies [dim / 2] of Megatron's own making, which differ from the specification's in last bits.
        self._frequencies = (row if self._factor == 1.0 else rotary.inv_freq).clone()

    def positions(self, first: Tensor) -> Tensor:
        """Positions [length] of angles of the first pair, whose frequency is 1 before linear scaling."""
        return (first * self._factor).round().long()

    def changed(self, angles: Tensor, mscale: float) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [length, dim / 2] of ``angles`` [length, dim], correctly rounded, where they are not those
        of the frequencies at building; else None.
        """
        half = angles[:, : angles.shape[1] // 2]
        made = torch.outer(self.positions(half[:, 0]).float() * (1 / self._factor), self._frequencies.to(half.device))
        if half.equal(made) and np.float32(mscale) == self._mscale:
            return None
        table = table_of_angles(np.ascontiguousarray(half.detach().cpu().float().numpy()), mscale)
        return torch.from_numpy(table.cos.copy()), torch.from_numpy(table.sin.copy())


def strict_rope(native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's RoPE function; models without a strict profile keep ``native``."""

    def apply(
        t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Any = None, mscale: float = 1.0, **rest: Any
    ) -> Tensor:
        own = getattr(config, OPERATORS, None)
        if own is None:
            return native(t, freqs, config, cu_seqlens=cu_seqlens, mscale=mscale, **rest)
        if cu_seqlens is not None or config.rotary_interleaved:
            raise TypeError("packed or interleaved RoPE has no strict path yet")
        length, batch, heads, dim = t.shape
        rope: LiveRope = config.rlk_rope
        positions = rope.positions(freqs[:, 0, 0, 0])
        given = None
        if (changed := rope.changed(freqs[:, 0, 0], float(mscale))) is not None:
            given = own.given_table(*(part.repeat_interleave(batch, dim=0) for part in changed))
        rows = positions[:, None].expand(length, batch).reshape(-1)
        turned = int(freqs.shape[-1])
        whole = t.reshape(-1, heads, dim)
        part = whole if turned == dim else whole[..., :turned].contiguous()
        rotated = functions.Rope.apply(own, part, rows, config.rlk_theta, freqs.shape[0], given)
        if turned != dim:
            rotated = torch.cat([rotated, whole[..., turned:]], dim=-1)
        return rotated.reshape(length, batch, heads, dim)

    return apply
