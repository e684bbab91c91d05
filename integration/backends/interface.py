"""What an engine asks of the strict operators: one interface, whatever computes them.

Tensors lie on one device. Activations are in the model's dtype, logits and everything after them in float32. An
implementation computes exactly what the contracts of its profile say, or refuses before an engine starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from reference.contract.profiles import profile as find_profile
from reference.primitives import RopeParameters

Tensor = Any
#: A weight as an implementation reads it fastest: made by `Operators.weight`, opaque to everybody else.
Weight = Any
#: Cosines and sines of positions: made by `Operators.rope_table`, opaque to everybody else.
Table = Any
#: Profiles that engines can follow: specifications, not descriptions of engines.
STRICT = ("strict-v1/fma32-seq", "strict-v1/mfma-cdna3-g8", "strict-v1/hopper-k16")


class Logsumexp(NamedTuple):
    """``value`` = ``maximum`` + log(``total``), float32, [rows] each."""

    value: Tensor
    maximum: Tensor
    total: Tensor


class BackendError(RuntimeError):
    """No implementation gives the bits of this profile for tensors of that device; the message names both."""


class Gradients(Protocol):
    """The gradients of the operators, under the contracts of `reference.gradients`.

    Those of parameters are float32 sums that a call adds to, in place: chains that go on from micro-batch to
    micro-batch. Of tensors [tokens, sequences, ...] sequences are added one after the other, so that bits do not
    depend on how they were batched. ``operator`` is "linear", "row_linear" or "lm_head".
    """

    def causal_attention_result(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`Operators.causal_attention`, and the tensors that its gradient needs."""
        ...

    def causal_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        ...

    def embedding_backward(self, grad: Tensor, tokens: Tensor, sums: Tensor) -> None:
        """The table's into ``sums`` [vocabulary, hidden]; ``tokens`` [..., tokens], one sequence after the other."""
        ...

    def rms_norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, sums: Tensor) -> Tensor:
        """Of ``x`` [tokens, sequences, hidden]; the weight's into ``sums`` [1, hidden]."""
        ...

    def qk_norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, sums: Tensor) -> Tensor:
        """Of ``x`` [tokens, sequences, heads, head_dim]; the weight's, by head, into ``sums`` [heads, head_dim]."""
        ...

    def merge_heads(self, sums: Tensor, ranks: int) -> Tensor:
        """This rank's share of a head norm's weight gradient, float32 [head_dim], from its sums by head."""
        ...

    def linear_input_gradient(self, operator: str, grad: Tensor, weight: Tensor, joined: int) -> Tensor:
        """Of the input, on one rank; ``weight`` [outputs, inputs] holds ``joined`` projections one below the other."""
        ...

    def linear_input_partial(self, operator: str, grad: Tensor, weight: Tensor, joined: int, ranks: int) -> Tensor:
        """This rank's share of the input's, float32, not rounded."""
        ...

    def linear_input_merge(self, operator: str, partials: Sequence[Tensor]) -> Tensor:
        """All ranks' shares, rank 0 first, merged and rounded."""
        ...

    def linear_weight_gradient(self, operator: str, grad: Tensor, x: Tensor, sums: Tensor) -> None:
        """The weight's into ``sums`` [outputs, inputs]; ``grad`` and ``x`` are [tokens, sequences, ...]."""
        ...

    def bias_gradient(self, operator: str, grad: Tensor, sums: Tensor) -> None:
        """The bias's into ``sums`` [outputs]; ``grad`` is [tokens, sequences, outputs]."""
        ...

    def rotate_backward(self, grad: Tensor, positions: Tensor, table: Table) -> Tensor:
        """Of the input of `Operators.rotate`."""
        ...

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Of gate and up."""
        ...

    def processed_logits_backward(self, grad: Tensor, processed: Tensor, temperature: float) -> Tensor:
        """Of the logits [rows, vocabulary], float32; ``processed`` is what they became."""
        ...

    def logprob_backward(self, grad: Tensor, logits: Tensor, targets: Tensor, value: Tensor) -> Tensor:
        """Of the logits [rows, vocabulary], float32; ``value`` [rows] is their log-sum-exp."""
        ...

    def entropy_backward(self, grad: Tensor, logits: Tensor, value: Tensor, entropy: Tensor) -> Tensor:
        """Of the logits [rows, vocabulary], float32; ``value`` [rows] is their log-sum-exp."""
        ...


class Operators(Gradients, Protocol):
    """The operators of one profile for one model dtype on one kind of device."""

    #: dtype of the model.
    dtype: Any
    #: Operator -> contract, of the profile for that dtype. Whoever changes one changes the arithmetic.
    contracts: dict[str, Any]

    @property
    def calls(self) -> Counter[str]:
        """Calls of each operator since `clear`; of kernels their launches, replays of graphs included."""
        ...

    def clear(self) -> None:
        """Count from zero."""
        ...

    def evidence(self) -> Mapping[str, Any]:
        """Which operators ran, how often, by what, and under which contract; plain data."""
        ...

    def weight(self, weight: Tensor) -> Weight:
        """``weight`` [outputs, inputs] for the products; a change of ``weight`` in place may or may not be seen."""
        ...

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of ``table`` [vocabulary, hidden] for integer ``tokens`` of any shape."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Norm over the last axis of ``x`` [..., hidden]."""
        ...

    def rms_norm_residual(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """`residual_add`, and `rms_norm` of that sum: (norm, sum)."""
        ...

    def qk_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Norm of every head of ``x`` [..., heads, head_dim]."""
        ...

    def residual_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual, rounded once."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Projection of ``x`` [..., inputs]."""
        ...

    def row_linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """A row-parallel projection on one rank: partial and merge in one."""
        ...

    def row_linear_partial(self, x: Tensor, weight: Weight, ranks: int) -> Tensor:
        """This rank's share of a row-parallel projection, float32."""
        ...

    def row_linear_merge(self, partials: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        """Sum of all ranks' partials, rank 0 first, then the bias and the output rounding."""
        ...

    def whole_table(self, head_dim: int, theta: float | RopeParameters, length: int) -> Table | None:
        """The table of every position below ``length``; None where `rope_table` needs the positions themselves."""
        ...

    def rope_table(self, positions: Tensor, head_dim: int, theta: float | RopeParameters, length: int) -> Table:
        """Cosines and sines of ``positions`` [tokens], all of them below ``length``, which the host knows, for the
        first ``head_dim`` features of a head; ``theta`` or all parameters of a scaled table.
        """
        ...

    def given_table(self, cos: Tensor, sin: Tensor) -> Table:
        """The table [tokens, head_dim / 2] of an engine changed while it lived, in the contract's precision."""
        ...

    def rotate(self, x: Tensor, positions: Tensor, table: Table) -> Tensor:
        """``x`` [tokens, heads, head_dim] rotated by the table of ``positions`` [tokens]; features behind those that
        the table is made for stay as they are.
        """
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        ...

    def moe_scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What a router ranks, and what its weights are gathered from: float32, [tokens, experts] each.

        Raises:
            BackendError: no mixture of experts is computed there.
        """
        ...

    def moe_choice(self, ranked: Tensor, k: int) -> Tensor:
        """The ``k`` experts that rank highest, int64 [tokens, k], best first."""
        ...

    def moe_weights(self, scores: Tensor, experts: Tensor) -> Tensor:
        """What each chosen expert weighs, float32 [tokens, k], in the order of ``experts``."""
        ...

    def moe_combine(self, outputs: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Weighted sum [tokens, hidden] of what the chosen experts returned, ``outputs`` [tokens, k, hidden]."""
        ...

    def lm_head(self, x: Tensor, weight: Weight) -> Tensor:
        """Logits [..., outputs], float32."""
        ...

    def processed_logits(
        self,
        logits: Tensor,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor | None = None,
        top_p: float | Tensor | None = None,
    ) -> Tensor:
        """Scaled and masked logits [rows, vocabulary]; a tensor [rows] gives each row a setting of its own."""
        ...

    def logsumexp(self, logits: Tensor) -> Logsumexp:
        """Log-sum-exp of the rows of ``logits`` [rows, vocabulary]."""
        ...

    def logprob(self, logits: Tensor, targets: Tensor, lse: Logsumexp) -> Tensor:
        """Log-probability [rows] of integer ``targets`` [rows]."""
        ...

    def all_logprobs(self, logits: Tensor, lse: Logsumexp) -> Tensor:
        """Log-probability of every token [rows, vocabulary]."""
        ...

    def entropy(self, logits: Tensor, lse: Logsumexp) -> Tensor:
        """Entropy [rows] of the softmax of ``logits``, in nats."""
        ...

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Attention of whole sequences over all keys or the ``window`` newest: ``q`` [tokens, batch, heads, head_dim],
        ``k`` and ``v`` with their KV heads.
        """
        ...


def check_profile(profile: str) -> str:
    """``profile``, if engines can follow it.

    Raises:
        ValueError: an unknown profile, or one that describes an engine.
    """
    name: str = find_profile(profile).name
    if name not in STRICT:
        raise ValueError(f"profile {profile!r} describes an engine; strict profiles: {', '.join(STRICT)}")
    return name
