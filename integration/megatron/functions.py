"""The reference operators as differentiable functions of torch: forward to the bit, backward deterministic.

The derivative is that of the mathematical operator: roundings pass gradients on unchanged. It is computed in float32
by PyTorch's own operators, whose order depends on shapes and threads but not on the run, and is rounded once to the
dtype of what it is a gradient of. Ranks exchange gradients as bytes and add them in a tree.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from integration.backends import Operators

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


class Embedding(torch.autograd.Function):  # type: ignore[misc]
    """(tokens, table) -> rows; ``mine`` masks the tokens of this rank's part of the table, None owns all."""

    @staticmethod
    def forward(ctx: Any, own: Operators, tokens: Tensor, table: Tensor, mine: Tensor | None, group: Group) -> Any:
        rows = own.embedding(tokens, table)
        ctx.save_for_backward(tokens, mine)
        ctx.shape = table.shape
        if mine is not None:
            for part, owned in zip(gather_ranks(rows, group), gather_ranks(mine, group), strict=True):
                rows = torch.where(owned.unsqueeze(-1), part, rows)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tokens, mine = ctx.saved_tensors
        wide = grad.float() if mine is None else torch.where(mine.unsqueeze(-1), grad.float(), 0.0)
        total = torch.zeros(ctx.shape, dtype=torch.float32)
        total.index_add_(0, tokens.reshape(-1), wide.reshape(-1, ctx.shape[1]))
        return None, None, total.to(grad.dtype), None, None


class RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """(x, weight) -> norm over the last axis; ``heads`` says that it is the norm of heads [..., heads, head_dim]."""

    @staticmethod
    def forward(ctx: Any, own: Operators, x: Tensor, weight: Tensor, epsilon: float, heads: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return own.qk_norm(x, weight, epsilon) if heads else own.rms_norm(x, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = (saved.float() for saved in ctx.saved_tensors)
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.epsilon)
        normal, wide = x * scale, grad.float()
        inner = wide * weight
        dx = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
        dweight = (wide * normal).reshape(-1, x.shape[-1]).sum(0)
        return None, dx.to(grad.dtype), dweight.to(ctx.saved_tensors[1].dtype), None, None


class Linear(torch.autograd.Function):  # type: ignore[misc]
    """(x, weight, bias) -> x @ weight.T + bias. Of a column-parallel layer, ``group`` shares x and adds its gradient.

    ``kind``: "linear", "lm_head" (float32 output), or "row" (this rank's partial sum of ``ranks``, float32).
    """

    @staticmethod
    def forward(
        ctx: Any, own: Operators, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, group: Group
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.group = None if kind == "row" else group
        own_weight = own.weight(weight)
        if kind == "linear":
            return own.linear(x, own_weight, bias)
        if kind == "lm_head":
            return own.lm_head(x, own_weight)
        return own.row_linear_partial(x, own_weight, 1 if group is None else group.size())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        wide = grad.float().reshape(-1, grad.shape[-1])
        dx = sum_ranks((wide @ weight.float()).reshape(x.shape), ctx.group).to(x.dtype)
        dweight = (wide.t() @ x.float().reshape(-1, x.shape[-1])).to(weight.dtype)
        dbias = None if bias is None else wide.sum(0).to(bias.dtype)
        return None, dx, dweight, dbias, None, None


class MergeRanks(torch.autograd.Function):  # type: ignore[misc]
    """(partial of this rank, bias) -> the sum of all ranks' partials, rounded."""

    @staticmethod
    def forward(ctx: Any, own: Operators, partial: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(bias)
        return own.row_linear_merge(gather_ranks(partial, group), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (bias,) = ctx.saved_tensors
        wide = grad.float()
        dbias = None if bias is None else wide.reshape(-1, grad.shape[-1]).sum(0).to(bias.dtype)
        return None, wide, dbias, None


class Rope(torch.autograd.Function):  # type: ignore[misc]
    """(x [tokens, heads, head_dim], positions [tokens]) -> rotated."""

    @staticmethod
    def forward(ctx: Any, own: Operators, x: Tensor, positions: Tensor, theta: float) -> Tensor:
        table = own.rope_table(positions, x.shape[-1], theta, x.shape[0])
        ctx.cos, ctx.sin = (torch.from_numpy(part)[:, None] for part in table)
        return own.rotate(x, positions, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = grad.float().chunk(2, dim=-1)
        dx = torch.cat([a * ctx.cos + b * ctx.sin, b * ctx.cos - a * ctx.sin], dim=-1)
        return None, dx.to(grad.dtype), None, None


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
        return own.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = (saved.float() for saved in ctx.saved_tensors)
        sigmoid, wide = torch.sigmoid(gate), grad.float()
        dgate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
        return None, dgate.to(grad.dtype), (wide * gate * sigmoid).to(grad.dtype)


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """Causal attention of whole sequences: q [tokens, batch, heads, head_dim], k and v with their KV heads."""

    @staticmethod
    def forward(ctx: Any, own: Operators, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return own.causal_attention(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v = (saved.float().permute(1, 2, 0, 3) for saved in ctx.saved_tensors)  # [batch, heads, tokens, d]
        _, heads, tokens, dim = q.shape
        group = heads // k.shape[1]
        wide_k, wide_v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scale = 1.0 / math.sqrt(dim)
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        p = torch.softmax((q @ wide_k.transpose(-1, -2) * scale).masked_fill(hidden, -math.inf), dim=-1)
        out = grad.float().permute(1, 2, 0, 3)
        dp = out @ wide_v.transpose(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        dq, dk, dv = ds @ wide_k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ out

        def share(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, group)).sum(2)

        return None, *(x.permute(2, 0, 1, 3).to(grad.dtype) for x in (dq, share(dk), share(dv)))


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
        whole = torch.cat(gather_ranks(logits, group), dim=-1)[:, :vocabulary]
        processed = own.processed_logits(whole, *shaping)
        ctx.first = 0 if group is None else group.rank() * logits.shape[1]
        ctx.width, ctx.temperature = logits.shape[1], shaping[0]
        ctx.save_for_backward(torch.isneginf(processed) & ~torch.isneginf(whole))
        return processed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (masked,) = ctx.saved_tensors
        whole = grad.masked_fill(masked, 0.0) / ctx.temperature
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
        ctx.save_for_backward(logits, targets, value)
        return own.logprob(logits, targets, lse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, targets, lse = ctx.saved_tensors
        dlogits = -torch.exp(logits - lse)
        dlogits[torch.arange(targets.numel()), targets] += 1.0
        return None, dlogits * grad[:, None], None, None
