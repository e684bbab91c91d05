"""The gradients of the strict operators on CPU tensors: the reference's, or the same bits from compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from integration.arrays import to_array, to_tensor
from reference import gradients as spec
from reference.checks import Float32Array
from reference.operators.attention import AttentionResult, attention_result
from reference.operators.kv_cache import DenseKeyValues

Tensor = Any


class ArrayGradients:
    """`integration.backends.interface.Gradients`; mixed into the operators on CPU tensors."""

    #: The module of the operators, and the functions behind the gradients: `loops.gradients`, or the reference's.
    _ops: Any
    _back: Any
    _called: Any
    _out: Any

    def causal_attention_result(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`causal_attention`, and what its gradient needs."""
        import torch

        positions, contract = np.arange(q.shape[0]), self._called("attention")
        function = getattr(self._ops, "attention_result", attention_result)
        parts = []
        for b in range(q.shape[1]):
            kv = DenseKeyValues(*(np.ascontiguousarray(to_array(part[:, b])) for part in (k, v)))
            parts.append(function(np.ascontiguousarray(to_array(q[:, b])), positions, kv, contract))
        output = torch.stack([self._out(part.output) for part in parts], dim=1)
        return output, (
            output,
            torch.from_numpy(np.stack([part.maximum for part in parts], axis=1)),
            torch.from_numpy(np.stack([part.total for part in parts], axis=1)),
        )

    def causal_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        import torch

        contract, columns = self._called("attention_backward"), []
        for b in range(q.shape[1]):
            result = AttentionResult(*(np.ascontiguousarray(to_array(part[:, b])) for part in saved))
            operands = (np.ascontiguousarray(to_array(part[:, b])) for part in (grad, q, k, v))
            columns.append(self._back.attention_backward(*operands, result, contract))
        of_q, of_k, of_v = (torch.stack([self._out(part[i]) for part in columns], dim=1) for i in range(3))
        return of_q, of_k, of_v

    def embedding_backward(self, grad: Tensor, tokens: Tensor, sums: Tensor) -> None:
        """Add the gradient of the table [vocabulary, hidden] to float32 ``sums``, one sequence after the other."""
        rows = to_array(grad).reshape(-1, tokens.shape[-1], grad.shape[-1])
        chosen = tokens.detach().numpy().reshape(-1, tokens.shape[-1])
        self._back.embedding_backward(rows, chosen, self._called("embedding_backward"), to_array(sums))

    def rms_norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, sums: Tensor) -> Tensor:
        """Gradient of ``x``; the weight's is added to float32 ``sums`` [1, hidden]."""
        return self._norm_backward("rms_norm_backward", grad[..., None, :], x[..., None, :], weight, epsilon, sums)

    def qk_norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, sums: Tensor) -> Tensor:
        """Gradient of ``x`` [tokens, sequences, heads, head_dim]; the weight's goes into ``sums`` [heads, head_dim]."""
        return self._norm_backward("qk_norm_backward", grad, x, weight, epsilon, sums)

    def _norm_backward(
        self, operator: str, grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, sums: Tensor
    ) -> Tensor:
        arrays = (to_array(part) for part in (grad, x, weight))
        found = self._back.norm_backward(*arrays, epsilon, self._called(operator), to_array(sums))
        return self._out(np.ascontiguousarray(found)).reshape(x.shape)

    def merge_heads(self, sums: Tensor, ranks: int) -> Tensor:
        """This rank's share of a head norm's gradient [head_dim] from its sums by head."""
        contract = self.contracts["qk_norm_backward"]  # type: ignore[attr-defined]
        return _float32(spec.merge_heads(to_array(sums), contract, ranks))

    def linear_input_gradient(self, operator: str, grad: Tensor, weight: Tensor, joined: int) -> Tensor:
        """Gradient [..., inputs] of the input of a projection by ``weight`` on one rank."""
        contract = self._called(operator + "_backward")
        partial = self._back.linear_input_partial(_rows(grad), to_array(weight), contract, 1, joined=joined)
        merged = self._back.linear_input_merge([partial], contract)
        return self._out(merged).reshape(*grad.shape[:-1], weight.shape[1])

    def linear_input_partial(self, operator: str, grad: Tensor, weight: Tensor, joined: int, ranks: int) -> Tensor:
        """This rank's share of that gradient, float32."""
        contract = self._called(operator + "_backward")
        partial = self._back.linear_input_partial(_rows(grad), to_array(weight), contract, ranks, joined=joined)
        return _float32(partial).reshape(*grad.shape[:-1], weight.shape[1])

    def linear_input_merge(self, operator: str, partials: Sequence[Tensor]) -> Tensor:
        """All ranks' shares, rank 0 first, merged and rounded."""
        parts = [_rows(part) for part in partials]
        merged = self._back.linear_input_merge(parts, self.contracts[operator + "_backward"])  # type: ignore[attr-defined]
        return self._out(merged).reshape(partials[0].shape)

    def linear_weight_gradient(self, operator: str, grad: Tensor, x: Tensor, sums: Tensor) -> None:
        """Add the gradient of a weight to float32 ``sums`` [outputs, inputs]; [tokens, sequences, ...]."""
        dy, rows = (to_array(part).swapaxes(0, 1) for part in (grad, x))
        self._back.linear_weight_gradient(dy, rows, self.contracts[operator + "_backward"], to_array(sums))  # type: ignore[attr-defined]

    def bias_gradient(self, operator: str, grad: Tensor, sums: Tensor) -> None:
        """Add the gradient of a bias to float32 ``sums`` [outputs]; ``grad`` is [tokens, sequences, outputs]."""
        self._back.bias_gradient(to_array(grad), self.contracts[operator + "_backward"], to_array(sums))  # type: ignore[attr-defined]

    def rotate_backward(self, grad: Tensor, positions: Tensor, table: Any) -> Tensor:
        """Gradient of `rotate`."""
        return self._out(self._back.rope_backward(to_array(grad), table, self._called("rope_backward")))

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        arrays = (_rows(part) for part in (grad, gate, up))
        found = self._back.swiglu_backward(*arrays, self._called("swiglu_backward"))
        return self._out(found[0]).reshape(gate.shape), self._out(found[1]).reshape(up.shape)

    def processed_logits_backward(self, grad: Tensor, processed: Tensor, temperature: float) -> Tensor:
        """Gradient of the logits [rows, vocabulary]."""
        contract = self._called("processed_logits_backward")
        return _float32(
            self._back.processed_logits_backward(to_array(grad), to_array(processed), temperature, contract)
        )

    def logprob_backward(self, grad: Tensor, logits: Tensor, targets: Tensor, value: Tensor) -> Tensor:
        """Gradient of the logits [rows, vocabulary]; ``value`` is the log-sum-exp."""
        arrays = to_array(grad), to_array(logits), targets.detach().numpy(), to_array(value)
        return _float32(self._back.logprob_backward(*arrays, self._called("logprob_backward")))

    def entropy_backward(self, grad: Tensor, logits: Tensor, value: Tensor, entropy: Tensor) -> Tensor:
        """Gradient of the logits [rows, vocabulary]."""
        dy, x, lse, nats = (np.ascontiguousarray(to_array(part)) for part in (grad, logits, value, entropy))
        return _float32(spec.entropy_backward(dy, x, lse, nats, self._called("entropy_backward")))


def _rows(x: Tensor) -> Float32Array:
    return to_array(x).reshape(-1, x.shape[-1])


def _float32(values: Float32Array) -> Tensor:
    import torch

    return to_tensor(np.ascontiguousarray(values), torch.float32)
