"""The reference operators on tensors, with the contracts of one profile, counted.

Both engines call these and nothing else for the strict path, so that what they share is visible in one file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from integration.arrays import dtype_name, to_array, to_tensor
from reference import operators as ops
from reference.checks import Float32Array
from reference.contract.profiles import profile as find_profile
from reference.formats import FORMATS
from reference.operators.kv_cache import KeyValues
from reference.primitives import RopeParameters, inverse_frequencies
from reference.rounding import round_to

Tensor = Any
#: Profiles whose arithmetic the engines can follow on a CPU: specifications, not descriptions of engines.
STRICT = ("strict-v1/fma32-seq", "strict-v1/mfma-cdna3-g8", "strict-v1/hopper-k16")


class StrictOperators:
    """Contracts of one profile for one model dtype, and the operators that follow them.

    Tensors are on the CPU; activations are in the model's dtype, logits and everything after them in float32.

    Args:
        profile: name of a strict profile.
        dtype: torch dtype of the model.

    Raises:
        ValueError: an unknown profile, or one that describes an engine.
    """

    def __init__(self, profile: str, dtype: Any) -> None:
        self.profile = find_profile(profile)
        if self.profile.name not in STRICT:
            raise ValueError(f"profile {profile!r} describes an engine; strict profiles: {', '.join(STRICT)}")
        self.dtype = dtype
        self.contracts: dict[str, Any] = dict(self.profile.contracts(dtype_name(dtype)))
        self.calls: Counter[str] = Counter()
        #: The functions behind the operators: the reference's, or the same with compiled loops.
        self._ops: Any = _compiled() if self.profile.name == STRICT[0] else ops
        #: Positions, parameters, features, table of the last rotation, and whether the table is the specification's.
        self.rope_seen: tuple[Any, float | RopeParameters, int, ops.RopeTable, bool] | None = None
        self._rope_table: tuple[tuple[Any, ...], ops.RopeTable] | None = None

    def __deepcopy__(self, memo: Any) -> StrictOperators:
        """Copies of a model's configuration share what they count."""
        return self

    def evidence(self) -> dict[str, Any]:
        """Which operators ran, how often, and under which contract."""
        return {
            "profile": self.profile.name,
            "loops": self._ops.__name__,
            "operators": {
                name: {"calls": count, "contract_id": self.contracts[name].contract_id}
                for name, count in sorted(self.calls.items())
            },
        }

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of ``table`` [vocabulary, hidden] for integer ``tokens`` of any shape. Reads only the rows it needs."""
        contract = self._called("embedding")
        used, index = np.unique(tokens.detach().cpu().numpy().reshape(-1), return_inverse=True)
        import torch

        rows = self._ops.embedding(index, to_array(table.detach()[torch.from_numpy(used)]), contract)
        return self._out(rows).reshape(*tokens.shape, table.shape[1])

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Norm over the last axis of ``x`` [..., hidden]."""
        y = self._ops.rms_norm(_rows(x), to_array(weight), epsilon, self._called("rms_norm"))
        return self._out(y.output).reshape(x.shape)

    def qk_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Norm of every head of ``x`` [..., heads, head_dim]."""
        heads = to_array(x).reshape(-1, *x.shape[-2:])
        return self._out(self._ops.qk_norm(heads, to_array(weight), epsilon, self._called("qk_norm"))).reshape(x.shape)

    def residual_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual, rounded once."""
        return self._out(self._ops.residual_add(_rows(x), _rows(residual), self._called("residual_add"))).reshape(
            x.shape
        )

    def linear(self, x: Tensor, weight: Float32Array, bias: Tensor | None = None) -> Tensor:
        """Projection of ``x`` [..., inputs] by ``weight`` [outputs, inputs] (see `weight_array`)."""
        y = self._ops.linear(_rows(x), weight, self._called("linear"), None if bias is None else to_array(bias))
        return self._out(y).reshape(*x.shape[:-1], weight.shape[0])

    def row_linear_partial(self, x: Tensor, weight: Float32Array, ranks: int) -> Tensor:
        """This rank's share of a row-parallel projection, float32."""
        y = self._ops.row_linear_partial(_rows(x), weight, self._called("row_linear"), ranks)
        return to_tensor(y, _float32()).reshape(*x.shape[:-1], weight.shape[0])

    def row_linear_merge(self, partials: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        """Sum of all ranks' partials, rank 0 first, then the bias and the output rounding."""
        contract, reduction = self.contracts["row_linear"], self.contracts["all_reduce"]
        if len(partials) > 1:
            self._called("all_reduce")
        rows = [_rows(part) for part in partials]
        y = self._ops.row_linear_merge(rows, contract, reduction, None if bias is None else to_array(bias))
        return self._out(y).reshape(partials[0].shape)

    def rope(
        self,
        x: Tensor,
        positions: Tensor,
        theta: float | RopeParameters,
        dim: int | None = None,
        given: ops.RopeTable | None = None,
    ) -> Tensor:
        """Rotate the first ``dim`` features of ``x`` [tokens, heads, head_dim] by integer ``positions`` [tokens].

        Args:
            dim: None rotates whole heads.
            given: the table of an engine whose own was changed while it lived, rows of ``positions``; None is the
                specification's.
        """
        dim = int(x.shape[-1]) if dim is None else dim
        table = self.rope_table(positions, dim, theta) if given is None else self._narrowed(given)
        self.rope_seen = positions.detach().cpu().numpy(), theta, dim, table, given is None
        values = to_array(x)
        if dim == values.shape[-1]:
            return self._out(self._ops.rope(values, table, self._called("rope")))
        turned = self._ops.rope(np.ascontiguousarray(values[..., :dim]), table, self._called("rope"))
        return self._out(np.concatenate([turned, values[..., dim:]], axis=-1))

    def _narrowed(self, table: ops.RopeTable) -> ops.RopeTable:
        """``table`` in the precision of the contract."""
        form = self.contracts["rope"].precision.table
        return ops.RopeTable(*(round_to(part, FORMATS[form]) if form != "float32" else part for part in table))

    def rope_table(self, positions: Tensor, head_dim: int, theta: float | RopeParameters) -> ops.RopeTable:
        """Cosines and sines, float32 arrays [tokens, head_dim / 2], of ``positions`` [tokens]."""
        where = positions.detach().cpu().numpy().astype(np.int64, copy=False)
        key = (where.tobytes(), head_dim, theta, self.contracts["rope"])
        if self._rope_table is None or self._rope_table[0] != key:
            # Every layer of a forward rotates by the same positions.
            self._rope_table = key, self._ops.rope_table(where, head_dim, theta, self.contracts["rope"])
        return self._rope_table[1]

    def live_rope(self) -> dict[str, Any] | None:
        """What the last rotation read, for the capture's record: frequencies [dim / 2] or None where it was given a
        table, attention factor, and the rows of the table by position; None if nothing was rotated.
        """
        if self.rope_seen is None:
            return None
        positions, theta, dim, table, own = self.rope_seen
        parameters = theta if isinstance(theta, RopeParameters) else RopeParameters(float(theta))
        where, first = np.unique(positions, return_index=True)
        return {
            "frequencies": inverse_frequencies(dim, parameters) if own else None,
            "attention_factor": parameters.attention_factor if own else None,
            "positions": where,
            "cos": table.cos[first],
            "sin": table.sin[first],
        }

    def kv_cache(self, x: Tensor) -> Tensor:
        """Keys or values as the cache stores them."""
        return self._out(self._ops.to_cache(to_array(x), 1.0, self._called("kv_cache")))

    def read_blocks(
        self, cache: Tensor, blocks: NDArray[np.int64], start: int, stop: int
    ) -> tuple[Float32Array, Float32Array]:
        """Keys and values [stop - start, KV heads, head_dim] of a sequence that lies in ``blocks`` of ``cache``.

        ``cache`` is [blocks, KV heads, block size, 2 * head_dim], in the model's dtype.
        """
        import torch

        size, width = cache.shape[2], cache.shape[3]
        patterns = {torch.bfloat16: torch.uint16, torch.float32: torch.uint32}.get(self.dtype)
        if self._ops is not ops and patterns is not None:
            found: tuple[Float32Array, Float32Array]
            found = self._ops.gather_blocks(cache.view(patterns).numpy(), blocks, start, stop)
            return found
        first = start // size
        pages = cache[torch.from_numpy(blocks[first : -(-stop // size)])]
        tokens = pages.transpose(1, 2).reshape(-1, cache.shape[1], width)
        both = to_array(tokens[start - first * size : stop - first * size])
        return both[..., : width // 2], both[..., width // 2 :]

    def attention(
        self,
        q: Tensor,
        positions: NDArray[np.int64],
        kv: KeyValues,
        scale: float | None,
        window: int | None = None,
    ) -> Tensor:
        """Attention of some tokens ``q`` [tokens, heads, head_dim] of one sequence over its keys, or the ``window``
        newest of them.
        """
        contract = self._called("attention")
        if window is None:
            return self._out(self._ops.attention(to_array(q), positions, kv, contract, scale=scale))
        return self._out(ops.attention(to_array(q), positions, kv, contract, scale=scale, window=window))

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        return self._out(self._ops.swiglu(_rows(gate), _rows(up), self._called("swiglu"))).reshape(gate.shape)

    def lm_head(self, x: Tensor, weight: Float32Array) -> Tensor:
        """Logits [..., outputs], float32."""
        y = self._ops.lm_head(_rows(x), weight, self._called("lm_head"))
        return to_tensor(y, _float32()).reshape(*x.shape[:-1], weight.shape[0])

    def processed_logits(
        self, logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
    ) -> Tensor:
        """Scaled and masked logits [rows, vocabulary], float32."""
        contract = self._called("processed_logits")
        return to_tensor(self._ops.processed_logits(to_array(logits), contract, temperature, top_k, top_p), _float32())

    def logsumexp(self, logits: Tensor) -> ops.LogsumexpResult:
        """Log-sum-exp of the rows of ``logits`` [rows, vocabulary]."""
        result: ops.LogsumexpResult = self._ops.logsumexp(to_array(logits), self._called("logsumexp"))
        return result

    def logprob(self, logits: Tensor, targets: Tensor, lse: ops.LogsumexpResult) -> Tensor:
        """Log-probability [rows] of integer ``targets`` [rows], float32."""
        chosen = targets.detach().cpu().numpy()
        return to_tensor(self._ops.logprob(to_array(logits), chosen, lse, self._called("logprob")), _float32())

    def all_logprobs(self, logits: Tensor, lse: ops.LogsumexpResult) -> Tensor:
        """Log-probability of every token [rows, vocabulary]: the operator sees each logit as a row of its own."""
        values = to_array(logits)
        width = values.shape[1]
        spread = ops.LogsumexpResult(*(np.repeat(part, width) for part in lse))
        column, target = values.reshape(-1, 1), np.zeros(values.size, np.int64)
        return to_tensor(self._ops.logprob(column, target, spread, self._called("logprob")), _float32()).reshape(
            logits.shape
        )

    def _called(self, operator: str) -> Any:
        """Count one call; the operator's contract."""
        self.calls[operator] += 1
        return self.contracts[operator]

    def _out(self, values: Float32Array) -> Tensor:
        return to_tensor(values, self.dtype)


def _compiled() -> Any:
    """The compiled operators, or the reference's where numba is not installed or ``RLK_COMPILED`` is 0."""
    if os.environ.get("RLK_COMPILED") == "0" or find_spec("numba") is None:
        return ops
    from integration import compiled

    return compiled


def weight_array(weight: Tensor) -> Float32Array:
    """A weight [outputs, inputs] as the products read it fastest: float32, columns contiguous."""
    return np.asfortranarray(to_array(weight))


def _rows(x: Tensor) -> Float32Array:
    return to_array(x).reshape(-1, x.shape[-1])


def _float32() -> Any:
    import torch

    return torch.float32
