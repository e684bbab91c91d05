"""vLLM's layers with the reference operators inside; vLLM instantiates them in place of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from integration.vllm.state import on_gpu, operators
from reference.operators import RopeTable
from reference.primitives import RopeParameters

Tensor = Any


def gather_ranks(tensor: Tensor) -> list[Tensor]:
    """``tensor`` of every tensor-parallel rank, in rank order, moved as bytes."""
    group = get_tp_group()
    if group.world_size == 1:
        return [tensor]
    local = tensor.contiguous().view(torch.uint8)
    parts = [torch.empty_like(local) for _ in range(group.world_size)]
    torch.distributed.all_gather(parts, local, group=group.device_group)
    return [part.view(tensor.dtype) for part in parts]


class StrictLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """Keeps the weight of a layer as the array that the products read.

    The tensor itself is given up, as vLLM's own CPU method does: a weight that is changed behind the array's back
    would go unnoticed, one that is not there cannot be.
    """

    def __init__(self, ranks: int | None) -> None:
        """``ranks``: of a row-parallel layer, whose products are partial sums."""
        super().__init__()
        self._ranks = ranks

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.rlk_weight = operators(layer.weight.dtype).weight(layer.weight)
        layer.rlk_dtype = layer.weight.dtype
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product: of a row-parallel layer, this rank's share in float32, without bias."""
        own = operators(layer.rlk_dtype)
        if self._ranks is None:
            return own.linear(x, layer.rlk_weight, bias)
        return own.row_linear_partial(x, layer.rlk_weight, self._ranks)


class KernelLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """The kernels read a layer's weight where it lies: it may be overwritten in place, captured graphs included."""

    def __init__(self, ranks: int | None) -> None:
        """``ranks``: of a row-parallel layer."""
        super().__init__()
        self._ranks = ranks

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.rlk_dtype = layer.weight.dtype

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `StrictLinearMethod.apply`."""
        own = operators(layer.weight.dtype)
        if self._ranks is None:
            return own.linear(x, layer.weight, bias)
        return own.row_linear_partial(x, layer.weight, self._ranks)


def use_strict_method(layer: Any, ranks: int | None = None) -> None:
    """Give a linear ``layer`` of vLLM's the strict products.

    Raises:
        TypeError: it is quantised, or sharded over GPUs.
    """
    if type(layer.quant_method) is not UnquantizedLinearMethod:
        method = type(layer.quant_method).__name__
        raise TypeError(f"{layer.prefix}: {method} has no strict contract; use an unquantised model")
    if on_gpu() and layer.tp_size > 1:
        raise TypeError(f"{layer.prefix}: tensor parallelism over GPUs has no strict path yet")
    layer.quant_method = (KernelLinearMethod if on_gpu() else StrictLinearMethod)(ranks)


class StrictQKVParallelLinear(QKVParallelLinear):  # type: ignore[misc]
    """q, k and v of this rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_strict_method(self)


class StrictMergedColumnParallelLinear(MergedColumnParallelLinear):  # type: ignore[misc]
    """gate and up of this rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_strict_method(self)


class StrictRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """o_proj and down_proj: the ranks' partial sums are gathered, and merged here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.input_is_parallel and self.reduce_results) or self.skip_bias_add:
            raise TypeError(f"{self.prefix}: this form of row parallelism has no strict contract")
        use_strict_method(self, self.tp_size)

    def forward(self, input_: Tensor) -> Any:
        own = operators(self.rlk_dtype)
        if torch.compiler.is_compiling():  # one rank, and nobody looks at its partial sum
            output = own.row_linear(input_, self.weight, self.bias)
        else:
            partial = self.quant_method.apply(self, input_)
            output = own.row_linear_merge(gather_ranks(partial), self.bias)
        return (output, None) if self.return_bias else output


class StrictRMSNorm(RMSNorm):  # type: ignore[misc]
    """[tokens, hidden], alone or after the residual add; [tokens, heads, head_dim] is the norm of heads."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if not self.has_weight or self.variance_size_override is not None:
            raise TypeError("a norm without weight, or over a part of the row, has no strict contract")
        own, weight = operators(x.dtype), self.weight.data
        if x.ndim == 3:
            return own.qk_norm(x, weight, self.variance_epsilon)
        if residual is None:
            return own.rms_norm(x, weight, self.variance_epsilon)
        return own.rms_norm_residual(x, residual, weight, self.variance_epsilon)


class _StrictRotation:
    """Rotates q and k [tokens, heads * head_dim] with the specification's table, of whichever scaling it is mixed into.

    A table that was changed while the engine lived is obeyed instead of the specification's: a change that shows in no
    bit would be one that nobody can find.
    """

    # Of vLLM's class that it is mixed into.
    is_neox_style: bool
    rotary_dim: int
    head_size: int
    cos_sin_cache: Tensor
    dtype: Any
    register_buffer: Any
    rlk_cos: Tensor
    rlk_sin: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.is_neox_style or (on_gpu() and self.rotary_dim != self.head_size):
            raise TypeError("RoPE of interleaved pairs, or on a GPU over a part of the head, has no strict contract")
        #: vLLM's own table as it was made, to notice that somebody changed it since.
        self.rlk_made = self.cos_sin_cache.clone()
        length = self.rlk_made.shape[0]
        whole = operators(self.dtype).whole_table(self.rotary_dim, self.rlk_parameters(), length)
        self.register_buffer("rlk_cos", None if whole is None else whole.cos, persistent=False)
        self.register_buffer("rlk_sin", None if whole is None else whole.sin, persistent=False)

    def rlk_parameters(self) -> float | RopeParameters:
        """What the table is made from, read from the live module."""
        live: Any = self
        theta = float(live.base)
        if isinstance(self, Llama3RotaryEmbedding):
            return RopeParameters(
                theta,
                "llama3",
                float(live.scaling_factor),
                float(live.low_freq_factor),
                float(live.high_freq_factor),
                int(live.orig_max_position),
            )
        if isinstance(self, YaRNScalingRotaryEmbedding):
            return RopeParameters(
                theta,
                "yarn",
                float(live.scaling_factor),
                original_max_position_embeddings=int(live.max_position_embeddings),
                beta_fast=float(live.beta_fast),
                beta_slow=float(live.beta_slow),
                truncate=bool(live.truncate),
                attention_factor=float(live.mscale),
            )
        if isinstance(self, LinearScalingRotaryEmbedding):
            if len(live.scaling_factors) != 1:
                raise TypeError("several linear scaling factors at once have no strict contract")
            return RopeParameters(theta, "linear", float(live.scaling_factors[0]))
        return theta

    def table(self, positions: Tensor) -> Any:
        """Cosines and sines of ``positions`` [tokens], as the operators take them."""
        if self.rlk_cos is not None:
            return RopeTable(self.rlk_cos, self.rlk_sin)
        own = operators(self.dtype)
        # On a GPU the comparison would wait for the device, which a captured graph cannot.
        if not positions.is_cuda and not self.cos_sin_cache[positions].equal(self.rlk_made[positions]):
            return own.given_table(*self.cos_sin_cache[positions].chunk(2, dim=-1))
        return own.rope_table(positions, self.rotary_dim, self.rlk_parameters(), self.rlk_made.shape[0])

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        live: Any = self
        own, where = operators(query.dtype), positions.flatten()
        table = self.table(where)

        def rotate(x: Tensor) -> Tensor:
            heads = x.reshape(where.shape[0], -1, live.head_size)
            return own.rotate(heads, where, table).reshape(x.shape)

        return rotate(query), None if key is None else rotate(key)


class StrictRotaryEmbedding(_StrictRotation, RotaryEmbedding):  # type: ignore[misc]
    """Plain RoPE."""


class StrictLinearScalingRotaryEmbedding(_StrictRotation, LinearScalingRotaryEmbedding):  # type: ignore[misc]
    """Positions divided by a factor."""


class StrictLlama3RotaryEmbedding(_StrictRotation, Llama3RotaryEmbedding):  # type: ignore[misc]
    """Llama 3's frequencies."""


class StrictYaRNScalingRotaryEmbedding(_StrictRotation, YaRNScalingRotaryEmbedding):  # type: ignore[misc]
    """YaRN's frequencies and attention factor."""


class StrictSiluAndMul(SiluAndMul):  # type: ignore[misc]
    """silu(gate) * up of [tokens, gate and up]."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return operators(x.dtype).swiglu(gate, up)


class StrictVocabParallelEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Rows of the table; with several ranks, those of the rank that owns the token, which no sum has touched."""

    def forward(self, input_: Tensor) -> Tensor:
        own, first = operators(self.weight.dtype), self.shard_indices.org_vocab_start_index
        last = self.shard_indices.org_vocab_end_index
        if self.tp_size == 1:
            return own.embedding(input_, self.weight[:last])
        mine = (input_ >= first) & (input_ < last)
        rows = own.embedding(torch.where(mine, input_ - first, 0), self.weight)
        for part, owned in zip(gather_ranks(rows), gather_ranks(mine), strict=True):
            rows = torch.where(owned.unsqueeze(-1), part, rows)
        return rows


class StrictParallelLMHead(ParallelLMHead):  # type: ignore[misc]
    """The head's weight; the product is the logits processor's."""


class StrictLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Logits in float32, of the whole vocabulary on every rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scale != 1.0 or self.soft_cap is not None or self.logits_as_input:
            raise TypeError("scaled or capped logits have no strict contract")

    def forward(
        self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None, skip_gather: bool = False
    ) -> Tensor:
        if embedding_bias is not None or skip_gather:
            raise TypeError("logits with a bias, or of one rank, have no strict contract")
        # Converted anew each time: a tied head is the embedding's weight, which may be changed in place.
        own = operators(hidden_states.dtype)
        if lm_head.tp_size == 1:
            return own.lm_head(hidden_states, own.weight(lm_head.weight[: self.org_vocab_size]))
        local = own.lm_head(hidden_states, own.weight(lm_head.weight))
        return torch.cat(gather_ranks(local), dim=-1)[..., : self.org_vocab_size]


#: vLLM's class -> ours, all through its public `register_oot`.
REPLACEMENTS = {
    RMSNorm: StrictRMSNorm,
    SiluAndMul: StrictSiluAndMul,
    LinearScalingRotaryEmbedding: StrictLinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding: StrictLlama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding: StrictYaRNScalingRotaryEmbedding,
    RotaryEmbedding: StrictRotaryEmbedding,
    QKVParallelLinear: StrictQKVParallelLinear,
    MergedColumnParallelLinear: StrictMergedColumnParallelLinear,
    RowParallelLinear: StrictRowParallelLinear,
    VocabParallelEmbedding: StrictVocabParallelEmbedding,
    ParallelLMHead: StrictParallelLMHead,
    LogitsProcessor: StrictLogitsProcessor,
}


def packed_attention(native: Any) -> Any:
    """Qwen3's attention layer with the norms and rotations of q and k in one kernel, where a compiler traces it.

    Elsewhere the layer's own modules run, one by one, so that each can be observed; the bits are the same.
    """

    def forward(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return native(self, positions, hidden_states)
        own: Any = operators(hidden_states.dtype)  # the kernels', which have it
        where = positions.flatten()
        qkv, _ = self.qkv_proj(hidden_states)
        both = own.packed_qk_norm_rope(
            qkv,
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.variance_epsilon,
            where,
            self.rotary_emb.table(where),
            self.num_heads,
            self.num_kv_heads,
        )
        value = qkv[:, self.q_size + self.kv_size :]
        output, _ = self.o_proj(self.attn(both[:, : self.num_heads], both[:, self.num_heads :], value))
        return output

    return forward
