"""The gradients of the strict operators by kernels: nothing is copied to the host, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastpath.attention.attention import AttentionResult, Packed, attention
from fastpath.attention.attention_backward import attention_backward
from fastpath.products import linear
from fastpath.rows.embedding import embedding_backward
from fastpath.rows.entropy import entropy_backward
from fastpath.rows.logprob import logprob_gradient
from fastpath.rows.processed_logits import processed_logits_backward
from fastpath.rows.qk_norm import merge_heads, qk_norm_backward
from fastpath.rows.rms_norm import rms_norm_backward
from fastpath.rows.rope import RopeTable, rope_backward
from fastpath.rows.swiglu import swiglu_backward

Tensor = Any


class KernelGradients:
    """`integration.backends.interface.Gradients`; mixed into the operators by kernels."""

    #: Operator -> contract, gradients among them.
    contracts: dict[str, Any]

    def causal_attention_result(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`causal_attention`, and what its gradient needs."""
        packed, starts = _end_to_end(q, k, v)
        kv = Packed(packed[1], packed[2], starts)
        found = attention(packed[0], starts, q.shape[0], kv, self.contracts["attention"], save=True)
        assert found.maxima is not None and found.sums is not None
        return _side_by_side(found.output, q), (found.output, found.maxima, found.sums)

    def causal_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        (q_rows, k_rows, v_rows, dy), starts = _end_to_end(q, k, v, grad)
        length, contract = q.shape[0], self.contracts["attention_backward"]
        kv, result = Packed(k_rows, v_rows, starts), AttentionResult(*saved)
        found = attention_backward(dy, q_rows, starts, length, kv, length, result, contract)
        return _side_by_side(found.q, q), _side_by_side(found.k, k), _side_by_side(found.v, v)

    def embedding_backward(self, grad: Tensor, tokens: Tensor, sums: Tensor) -> None:
        """Add the gradient of the table [vocabulary, hidden] to float32 ``sums``, one sequence after the other."""
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        contract = self.contracts["embedding_backward"]
        embedding_backward(rows, tokens.reshape(-1).contiguous(), sums.shape[0], contract, sums=sums)

    def rms_norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, sums: Tensor) -> Tensor:
        """Gradient of ``x`` [tokens, sequences, hidden]; the weight's is added to float32 ``sums`` [1, hidden]."""
        rows, contract = x.reshape(-1, x.shape[-1]).contiguous(), self.contracts["rms_norm_backward"]
        dy = grad.reshape(rows.shape).contiguous()
        found = rms_norm_backward(dy, rows, weight, epsilon, contract, sequences=x.shape[1], sums=sums)
        return found.x.view(x.shape)

    def qk_norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, sums: Tensor) -> Tensor:
        """Gradient of ``x`` [tokens, sequences, heads, head_dim]; the weight's goes into ``sums`` [heads, head_dim]."""
        rows, contract = x.reshape(-1, *x.shape[2:]).contiguous(), self.contracts["qk_norm_backward"]
        dy = grad.reshape(rows.shape).contiguous()
        found = qk_norm_backward(dy, rows, weight, epsilon, contract, sequences=x.shape[1], sums=sums)
        return found.x.view(x.shape)

    def merge_heads(self, sums: Tensor, ranks: int) -> Tensor:
        """This rank's share of a head norm's gradient [head_dim] from its sums by head."""
        return merge_heads(sums, self.contracts["qk_norm_backward"], ranks)

    def linear_input_gradient(self, operator: str, grad: Tensor, weight: Tensor, joined: int) -> Tensor:
        """Gradient [..., inputs] of the input of a projection by ``weight`` on one rank."""
        found = linear.input_gradient(_rows(grad), weight, self.contracts[operator + "_backward"], joined=joined)
        return found.view(*grad.shape[:-1], weight.shape[1])

    def linear_input_partial(self, operator: str, grad: Tensor, weight: Tensor, joined: int, ranks: int) -> Tensor:
        """This rank's share of that gradient, float32."""
        contract = self.contracts[operator + "_backward"]
        found = linear.input_gradient_partial(_rows(grad), weight, contract, ranks, joined=joined)
        return found.view(*grad.shape[:-1], weight.shape[1])

    def linear_input_merge(self, operator: str, partials: Sequence[Tensor]) -> Tensor:
        """All ranks' shares, rank 0 first, merged and rounded."""
        stacked = torch.stack([_rows(part) for part in partials])
        return linear.input_gradient_merge(stacked, self.contracts[operator + "_backward"]).view(partials[0].shape)

    def linear_weight_gradient(self, operator: str, grad: Tensor, x: Tensor, sums: Tensor) -> None:
        """Add the gradient of a weight to float32 ``sums`` [outputs, inputs]; [tokens, sequences, ...]."""
        contract = self.contracts[operator + "_backward"]
        linear.weight_gradient(grad.transpose(0, 1), x.transpose(0, 1), contract, sums)

    def bias_gradient(self, operator: str, grad: Tensor, sums: Tensor) -> None:
        """Add the gradient of a bias to float32 ``sums`` [outputs]; ``grad`` is [tokens, sequences, outputs]."""
        contract = self.contracts[operator + "_backward"]
        linear.bias_gradient(_rows(grad), contract, sequences=grad.shape[1], sums=sums)

    def rotate_backward(self, grad: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        """Gradient of `rotate`."""
        return rope_backward(grad.contiguous(), positions, table, self.contracts["rope_backward"])

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        shape, contract = (-1, gate.shape[-1]), self.contracts["swiglu_backward"]
        found = swiglu_backward(_rows(grad), gate.reshape(shape), up.reshape(shape), contract)
        return found[0].view(gate.shape), found[1].view(up.shape)

    def processed_logits_backward(self, grad: Tensor, processed: Tensor, temperature: float) -> Tensor:
        """Gradient of the logits [rows, vocabulary]."""
        contract = self.contracts["processed_logits_backward"]
        return processed_logits_backward(grad.contiguous(), processed, temperature, contract)

    def logprob_backward(self, grad: Tensor, logits: Tensor, targets: Tensor, value: Tensor) -> Tensor:
        """Gradient of the logits [rows, vocabulary]; ``value`` is the log-sum-exp."""
        contract = self.contracts["logprob_backward"]
        return logprob_gradient(logits, targets, value, grad.contiguous(), contract, torch.float32)

    def entropy_backward(self, grad: Tensor, logits: Tensor, value: Tensor, entropy: Tensor) -> Tensor:
        """Gradient of the logits [rows, vocabulary]; ``value`` is the log-sum-exp, ``entropy`` in nats."""
        contract = self.contracts["entropy_backward"]
        return entropy_backward(grad.contiguous(), logits, value, entropy, contract)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _end_to_end(*parts: Tensor) -> tuple[list[Tensor], Tensor]:
    """[tokens, sequences, heads, head_dim] as rows of one sequence after the other, and where sequences start."""
    length, batch = parts[0].shape[:2]
    rows = [part.transpose(0, 1).reshape(-1, *part.shape[2:]).contiguous() for part in parts]
    starts = torch.arange(0, batch * length + 1, max(length, 1), dtype=torch.int32, device=parts[0].device)
    return rows, starts[: batch + 1]


def _side_by_side(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_end_to_end`, for a tensor of the shape of ``like``."""
    return rows.view(like.shape[1], like.shape[0], *like.shape[2:]).transpose(0, 1)
