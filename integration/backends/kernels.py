"""The kernels of `fastpath` behind the interface: nothing is copied to the host, and nothing waits for the device.

What an engine traces sees `torch.ops.rlk.*`: opaque to the compiler, with the contract as a constant. So a step can be
compiled, captured into a graph and replayed, and the bits stay the contract's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from fastpath import launches
from fastpath.attention.attention import Pages, attention
from fastpath.attention.kv_cache import write_cache
from fastpath.autograd import inference, products, rows
from fastpath.backend import UnsupportedError, current_target
from fastpath.products.row_linear import row_linear_merge, row_linear_partial
from fastpath.rows.entropy import entropy
from fastpath.rows.logprob import all_logprobs, logprob
from fastpath.rows.logsumexp import LogsumexpResult, logsumexp
from fastpath.rows.processed_logits import processed_logits
from fastpath.rows.rope import RopeTable, rope_table
from integration.arrays import dtype_name
from integration.backends.interface import BackendError, Logsumexp, check_profile
from integration.backends.kernel_gradients import KernelGradients
from reference.contract.base import Contract
from reference.contract.profiles import profile as find_profile
from reference.gradients import gradient_contracts
from reference.primitives import RopeParameters

Tensor = Any
#: Modules that define `torch.ops.rlk`; importing them is what registers the operators.
OPERATOR_MODULES = (inference, products, rows)


@lru_cache(maxsize=256)
def _canonical(contract: Contract) -> str:
    return contract.to_json()


class KernelOperators(KernelGradients):
    """`integration.backends.interface.Operators` by kernels; what an engine on a GPU needs beside it is here too.

    Args:
        profile: name of a strict profile.
        dtype: torch dtype of the model: bfloat16 or float32.

    Raises:
        ValueError: an unknown profile, or one that describes an engine.
        BackendError: a dtype without kernels, no GPU, one whose code was not checked, or one without the profile's
            matrix unit.
    """

    def __init__(self, profile: str, dtype: torch.dtype) -> None:
        self.profile = find_profile(check_profile(profile))
        if dtype not in (torch.bfloat16, torch.float32):
            raise BackendError(f"profile {self.profile.name}: {dtype} has no kernels; use bfloat16 or float32")
        self.dtype = dtype
        name = dtype_name(dtype)
        self.contracts: dict[str, Any] = {**self.profile.contracts(name), **gradient_contracts(self.profile, name)}
        try:
            self._target = current_target()
        except UnsupportedError as error:
            raise BackendError(f"profile {self.profile.name}: {error}") from None
        unit = str(self.contracts["linear"].primitives.unit)
        if unit not in self._target.units:
            raise BackendError(
                f"profile {self.profile.name} needs the matrix unit {unit}, and this device ({self._target.arch}) "
                f"computes {' and '.join(self._target.units)}: choose another profile or another device"
            )
        #: What a traced graph holds. A contract that is changed later is seen by what runs outside of a graph.
        self._traced = {name: contract.to_json() for name, contract in self.contracts.items()}

    def __deepcopy__(self, memo: Any) -> KernelOperators:
        """Copies of a model's configuration share it."""
        return self

    @property
    def calls(self) -> Counter[str]:
        """Kernel launches by operator since the counts were cleared, replayed ones included."""
        return launches.by_operator()

    def evidence(self) -> Mapping[str, Any]:
        """Which kernels ran, how often (replays of graphs included), and under which contract."""
        return {
            "profile": self.profile.name,
            "loops": f"kernels on {self._target.arch}",
            "operators": launches.evidence(),
        }

    def clear(self) -> None:
        """Count from zero."""
        launches.clear()

    def weight(self, weight: Tensor) -> Tensor:
        """The weight itself: the kernels read it where it lies, so a change in place is seen."""
        return weight

    def _text(self, operator: str) -> str:
        if torch.compiler.is_compiling():
            traced: str = self._traced[operator]
            return traced
        text: str = _canonical(self.contracts[operator])
        return text

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of ``table`` [vocabulary, hidden] for integer ``tokens`` of any shape."""
        rows = torch.ops.rlk.embedding(tokens.reshape(-1), table, self._text("embedding"))
        return rows.reshape(*tokens.shape, table.shape[1])

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Norm over the last axis of ``x`` [..., hidden]."""
        rows = _rows(x)
        return torch.ops.rlk.rms_norm(rows, weight, epsilon, self._text("rms_norm")).reshape(x.shape)

    def rms_norm_residual(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """`residual_add`, and `rms_norm` of that sum, in one kernel."""
        output, total = torch.ops.rlk.rms_norm_residual(
            _rows(x), _rows(residual), weight, epsilon, self._text("rms_norm")
        )
        return output.reshape(x.shape), total.reshape(x.shape)

    def qk_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Norm of every head of ``x`` [..., heads, head_dim]."""
        heads = _strided(x.reshape(-1, *x.shape[-2:]))
        return torch.ops.rlk.qk_norm(heads, weight, epsilon, self._text("qk_norm")).reshape(x.shape)

    def residual_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual, rounded once."""
        total = torch.ops.rlk.residual_add(_rows(x), _rows(residual), self._text("residual_add"))
        return total.reshape(x.shape)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Projection of ``x`` [..., inputs]."""
        return self._product(x, weight, bias, "linear")

    def row_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A row-parallel projection on one rank."""
        return self._product(x, weight, bias, "row_linear")

    def moe_scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Refused: `fastpath.experts` has the kernels, and no engine on a GPU was run with them."""
        raise self._no_experts()

    def moe_choice(self, ranked: Tensor, k: int) -> Tensor:
        """See `moe_scores`."""
        raise self._no_experts()

    def moe_weights(self, scores: Tensor, experts: Tensor) -> Tensor:
        """See `moe_scores`."""
        raise self._no_experts()

    def moe_combine(self, outputs: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """See `moe_scores`."""
        raise self._no_experts()

    def _no_experts(self) -> BackendError:
        return BackendError(f"profile {self.profile.name}: a mixture of experts has no strict path on a GPU yet")

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Logits [..., outputs], float32."""
        return self._product(x, weight, None, "lm_head")

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, operator: str) -> Tensor:
        rows = _rows(x)
        y = torch.ops.rlk.linear_bias(rows, weight, bias, self._text(operator))
        return y.reshape(*x.shape[:-1], weight.shape[0])

    def row_linear_partial(self, x: Tensor, weight: Tensor, ranks: int) -> Tensor:
        """This rank's share of a row-parallel projection, float32."""
        y = row_linear_partial(_rows(x), weight, self.contracts["row_linear"], ranks)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    def row_linear_merge(self, partials: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        """Sum of all ranks' partials, rank 0 first, then the bias and the output rounding."""
        stacked = torch.stack([part.reshape(-1, part.shape[-1]) for part in partials])
        y = row_linear_merge(stacked, self.contracts["row_linear"], self.contracts["all_reduce"], bias)
        return y.reshape(partials[0].shape)

    def whole_table(self, head_dim: int, theta: float | RopeParameters, length: int) -> RopeTable:
        """Cosines and sines of every position below ``length``."""
        return rope_table(length, head_dim, theta, self.contracts["rope"], _device())

    def rope_table(self, positions: Tensor, head_dim: int, theta: float | RopeParameters, length: int) -> RopeTable:
        """As `whole_table`, of a power of two of positions, so that few tables are ever made."""
        return self.whole_table(head_dim, theta, 1 << max(length - 1, 255).bit_length())

    def packed_qk_norm_rope(
        self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, positions: Tensor, table: RopeTable,
        heads: int, kv_heads: int,
    ) -> Tensor:  # fmt: skip
        """`qk_norm` and `rotate` of the query and key heads of a packed projection: [tokens, heads + KV heads, ...]."""
        return torch.ops.rlk.packed_qk_norm_rope(
            qkv, q_weight, k_weight, positions, table.cos, table.sin, heads, kv_heads, epsilon,
            self._text("qk_norm"), self._text("rope"),
        )  # fmt: skip

    def given_table(self, cos: Tensor, sin: Tensor) -> RopeTable:
        """Raises:
        BackendError: kernels read the table of all positions, of the specification only.
        """
        raise BackendError("the rotary embedding was changed while the engine lived: kernels have no such table")

    def rotate(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        """``x`` [tokens, heads, head_dim] rotated by the angles of its positions."""
        return torch.ops.rlk.rope(_strided(x), positions.contiguous(), table.cos, table.sin, self._text("rope"), False)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        shape = (-1, gate.shape[-1])
        return torch.ops.rlk.swiglu(
            _strided(gate.reshape(shape)), _strided(up.reshape(shape)), self._text("swiglu")
        ).reshape(gate.shape)

    def processed_logits(
        self,
        logits: Tensor,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor | None = None,
        top_p: float | Tensor | None = None,
    ) -> Tensor:
        """Scaled and masked logits [rows, vocabulary]; a tensor [rows] gives each row a setting of its own."""
        return processed_logits(logits, self.contracts["processed_logits"], temperature, top_k, top_p)

    def logsumexp(self, logits: Tensor) -> Logsumexp:
        """Log-sum-exp of the rows of ``logits`` [rows, vocabulary]."""
        return Logsumexp(*logsumexp(logits, self.contracts["logsumexp"]))

    def logprob(self, logits: Tensor, targets: Tensor, lse: Logsumexp) -> Tensor:
        """Log-probability [rows] of integer ``targets`` [rows]."""
        return logprob(logits, targets, LogsumexpResult(*lse), self.contracts["logprob"])

    def all_logprobs(self, logits: Tensor, lse: Logsumexp) -> Tensor:
        """Log-probability of every token [rows, vocabulary]."""
        return all_logprobs(logits, LogsumexpResult(*lse), self.contracts["logprob"])

    def entropy(self, logits: Tensor, lse: Logsumexp) -> Tensor:
        """Entropy [rows] of the softmax of ``logits``, in nats."""
        own = (self.contracts["entropy"], self.contracts["logsumexp"])
        return entropy(logits, LogsumexpResult(*lse), *own)

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Attention of whole sequences: q [tokens, batch, heads, head_dim], k and v with their KV heads.

        Raises:
            BackendError: a window.
        """
        if window is not None:
            raise BackendError(f"a window of {window} keys: the kernels of whole sequences attend to all keys")
        return self.causal_attention_result(q, k, v)[0]

    def write_cache(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store ``key`` and ``value`` [tokens, KV heads, head_dim] at flat slots of ``cache`` [2, blocks, ...]."""
        count = slots.shape[0]
        write_cache(key[:count], value[:count], slots, cache[0], cache[1], self.contracts["kv_cache"])

    def paged_attention(
        self, q: Tensor, starts: Tensor, most: int, cache: Tensor, tables: Tensor, lengths: Tensor,
        scale: float | None, out: Tensor,
    ) -> None:  # fmt: skip
        """Attention of the last tokens of sequences over ``cache`` [2, blocks, size, KV heads, head_dim], into ``out``.

        Args:
            q, out: [tokens, heads, head_dim].
            starts: int32 [sequences + 1]: first query of every sequence.
            most: the largest number of queries of a sequence.
            tables: int32 [sequences, blocks]. lengths: int32 [sequences].
        """
        pages = Pages(cache[0], cache[1], tables, lengths)
        attention(q, starts, most, pages, self.contracts["attention"], scale=scale, out=out)


def _device() -> str:
    return "cpu" if current_target().runtime == "interpreter" else "cuda"


def _rows(x: Tensor) -> Tensor:
    """``x`` [..., features] as contiguous rows: an engine may hand on a view of any strides."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if torch.compiler.is_compiling() else rows.contiguous()


def _strided(x: Tensor) -> Tensor:
    """``x``, copied unless its rows are contiguous, at whatever distance: a slice of a packed projection stays one."""
    if torch.compiler.is_compiling():  # vLLM's own views, which are such slices
        return x
    return x if x[0:1].is_contiguous() else x.contiguous()
