"""The strict operators as differentiable functions of torch: what computes them is the operators' affair.

Forward and backward are the contracts' to the bit, on a CPU and on a GPU (`integration.backends`). Gradients of
parameters add up in `integration.megatron.sums`. Ranks exchange partial sums as bytes and add them in a tree.
"""

from __future__ import annotations

from typing import Any

import torch

from integration.backends import Operators
from integration.megatron.sums import accumulate

Tensor = Any
Group = Any


def gather_ranks(tensor: Tensor, group: Group) -> list[Tensor]:
    """``tensor`` of every rank of ``group``, in rank order, moved as bytes; None is a group of one."""
    size = 1 if group is None else group.size()
    if size == 1:
        return [tensor]
    local = tensor.contiguous().view(torch.uint8)
    parts = [torch.empty_like(local) for _ in range(size)]
    torch.distributed.all_gather(parts, local, group=group)
    return [part.view(tensor.dtype) for part in parts]


def sum_ranks(tensor: Tensor, group: Group) -> Tensor:
    """Sum over ranks, neighbours first, the same bits on each."""
    parts = gather_ranks(tensor, group)
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def _by_sequence(x: Tensor) -> Tensor:
    """[tokens, sequences, features] of what may be the tokens of one sequence."""
    return x if x.ndim == 3 else x.reshape(-1, 1, x.shape[-1])


class Embedding(torch.autograd.Function):  # type: ignore[misc]
    """(tokens, table) -> rows; ``mine`` masks the tokens of this rank's part of the table, None owns all."""

    @staticmethod
    def forward(ctx: Any, own: Operators, tokens: Tensor, table: Tensor, mine: Tensor | None, group: Group) -> Any:
        rows = own.embedding(tokens, table)
        ctx.save_for_backward(tokens, mine)
        ctx.own, ctx.table = own, table
        if mine is not None:
            for part, owned in zip(gather_ranks(rows, group), gather_ranks(mine, group), strict=True):
                rows = torch.where(owned.unsqueeze(-1), part, rows)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tokens, mine = ctx.saved_tensors
        if mine is not None:  # tokens of other ranks add zeros to row 0
            grad = torch.where(mine.unsqueeze(-1), grad, 0.0)
        _, of_table = accumulate(
            ctx.table, lambda sums: ctx.own.embedding_backward(grad, tokens, sums), use="embedding"
        )
        return None, None, of_table, None, None


class RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """(x, weight) -> norm over the last axis; ``heads`` says that it is the norm of heads [..., heads, head_dim].

    ``group``: the ranks that share the heads.
    """

    @staticmethod
    def forward(
        ctx: Any, own: Operators, x: Tensor, weight: Tensor, epsilon: float, heads: bool, group: Group = None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.own, ctx.weight, ctx.epsilon, ctx.heads = own, weight, epsilon, heads
        ctx.ranks = 1 if group is None else group.size()
        return own.qk_norm(x, weight, epsilon) if heads else own.rms_norm(x, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, weight), own = ctx.saved_tensors, ctx.own
        function = own.qk_norm_backward if ctx.heads else own.rms_norm_backward
        back, shape = x.shape, (x.shape[-2] if ctx.heads else 1, x.shape[-1])
        if not ctx.heads:
            x, grad = _by_sequence(x), _by_sequence(grad)
        elif x.ndim == 3:
            x, grad = x[:, None], grad[:, None]
        dx, of_weight = accumulate(
            ctx.weight,
            lambda sums: function(grad, x, weight, ctx.epsilon, sums),
            shape,
            merge=(lambda sums: own.merge_heads(sums, ctx.ranks)) if ctx.heads else (lambda sums: sums),
        )
        return None, dx.reshape(back), of_weight, None, None, None


class Linear(torch.autograd.Function):  # type: ignore[misc]
    """(x, weight, bias) -> x @ weight.T + bias. Of a column-parallel layer, ``group`` shares x and adds its gradient.

    ``kind``: "linear", "lm_head" (float32 output), or "row" (this rank's partial sum of ``ranks``, float32).
    ``joined``: how many projections the weight holds one below the other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own: Operators,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: str,
        group: Group,
        joined: int = 1,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.own, ctx.weight, ctx.bias, ctx.joined = own, weight, bias, joined
        ctx.operator = "row_linear" if kind == "row" else kind
        ctx.group = None if kind == "row" else group
        own_weight = own.weight(weight)
        if kind == "linear":
            return own.linear(x, own_weight, bias)
        if kind == "lm_head":
            return own.lm_head(x, own_weight)
        return own.row_linear_partial(x, own_weight, 1 if group is None else group.size())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, weight, _), own, operator = ctx.saved_tensors, ctx.own, ctx.operator
        grad = grad.to(x.dtype)
        dx = of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            ranks = 1 if ctx.group is None else ctx.group.size()
            if ranks == 1:
                dx = own.linear_input_gradient(operator, grad, weight, ctx.joined)
            else:
                partial = own.linear_input_partial(operator, grad, weight, ctx.joined, ranks)
                dx = own.linear_input_merge(operator, gather_ranks(partial, ctx.group))
        rows, by_sequence = _by_sequence(grad), _by_sequence(x)
        if ctx.needs_input_grad[2]:
            _, of_weight = accumulate(
                ctx.weight,
                lambda sums: own.linear_weight_gradient(operator, rows, by_sequence, sums),
                use="head" if operator == "lm_head" else "",
            )
        if ctx.bias is not None and ctx.needs_input_grad[3]:
            _, of_bias = accumulate(ctx.bias, lambda sums: own.bias_gradient(operator, rows, sums))
        return None, dx, of_weight, of_bias, None, None, None


class MergeRanks(torch.autograd.Function):  # type: ignore[misc]
    """(partial of this rank, bias) -> the sum of all ranks' partials, rounded."""

    @staticmethod
    def forward(ctx: Any, own: Operators, partial: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.own, ctx.bias = own, bias
        return own.row_linear_merge(gather_ranks(partial, group), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_bias = None
        if ctx.bias is not None and ctx.needs_input_grad[2]:
            rows = _by_sequence(grad)
            _, of_bias = accumulate(ctx.bias, lambda sums: ctx.own.bias_gradient("row_linear", rows, sums))
        return None, grad.float(), of_bias, None


class Rope(torch.autograd.Function):  # type: ignore[misc]
    """(x [tokens, heads, head_dim], positions [tokens]) -> rotated; positions are below ``length``.

    ``given``: a table in place of the specification's.
    """

    @staticmethod
    def forward(
        ctx: Any, own: Operators, x: Tensor, positions: Tensor, theta: Any, length: int = 0, given: Any = None
    ) -> Tensor:
        table = own.rope_table(positions, x.shape[-1], theta, length or x.shape[0]) if given is None else given
        ctx.save_for_backward(positions)
        ctx.own, ctx.table = own, table
        return own.rotate(x, positions, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (positions,) = ctx.saved_tensors
        return None, ctx.own.rotate_backward(grad, positions, ctx.table), None, None, None, None


class ResidualAdd(torch.autograd.Function):  # type: ignore[misc]
    """x + residual."""

    @staticmethod
    def forward(ctx: Any, own: Operators, x: Tensor, residual: Tensor) -> Tensor:
        return own.residual_add(x, residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad, grad


class Swiglu(torch.autograd.Function):  # type: ignore[misc]
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, own: Operators, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.own = own
        return own.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *ctx.own.swiglu_backward(grad, *ctx.saved_tensors)


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """Causal attention of whole sequences, over all keys or the ``window`` newest: q [tokens, batch, heads, head_dim],
    k and v with their KV heads.
    """

    @staticmethod
    def forward(ctx: Any, own: Operators, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        if window is not None:
            ctx.own = None
            return own.causal_attention(q, k, v, window)
        if not any(ctx.needs_input_grad):
            return own.causal_attention(q, k, v)
        output, saved = own.causal_attention_result(q, k, v)
        ctx.save_for_backward(q, k, v, *saved)
        ctx.own = own
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.own is None:
            raise TypeError("gradients of attention within a window have no strict contract yet")
        q, k, v, *saved = ctx.saved_tensors
        return None, *ctx.own.causal_attention_backward(grad, q, k, v, tuple(saved)), None


class ProcessedLogits(torch.autograd.Function):  # type: ignore[misc]
    """This rank's logits [rows, columns] -> all ranks' processed logits [rows, real vocabulary]."""

    @staticmethod
    def forward(
        ctx: Any,
        own: Operators,
        logits: Tensor,
        vocabulary: int,
        shaping: tuple[float, int | None, float | None],
        group: Group,
    ) -> Tensor:
        whole = torch.cat(gather_ranks(logits, group), dim=-1)[:, :vocabulary].contiguous()
        processed = own.processed_logits(whole, *shaping)
        ctx.first = 0 if group is None else group.rank() * logits.shape[1]
        ctx.own, ctx.width, ctx.temperature = own, logits.shape[1], shaping[0]
        ctx.save_for_backward(processed)
        return processed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (processed,) = ctx.saved_tensors
        whole = ctx.own.processed_logits_backward(grad.contiguous(), processed, ctx.temperature)
        mine = whole[:, ctx.first : ctx.first + ctx.width]
        return None, torch.nn.functional.pad(mine, (0, ctx.width - mine.shape[1])), None, None, None


class LogProb(torch.autograd.Function):  # type: ignore[misc]
    """(processed logits [rows, vocabulary], targets [rows]) -> log-probabilities [rows].

    ``see(value)`` is shown the log-sum-exp [rows, 1], and may return another.
    """

    @staticmethod
    def forward(ctx: Any, own: Operators, logits: Tensor, targets: Tensor, see: Any) -> Tensor:
        lse = own.logsumexp(logits)
        value = see(lse.value[:, None])
        lse = lse._replace(value=value[:, 0].contiguous())
        ctx.save_for_backward(logits, targets, lse.value)
        ctx.own = own
        return own.logprob(logits, targets, lse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.own.logprob_backward(grad.contiguous(), *ctx.saved_tensors), None, None
