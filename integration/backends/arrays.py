"""The reference operators on CPU tensors, with the contracts of one profile, counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from integration.arrays import dtype_name, to_array, to_tensor
from integration.backends import reference_gradients
from integration.backends.array_gradients import ArrayGradients
from integration.backends.interface import STRICT, Logsumexp, check_profile
from reference import operators as ops
from reference.checks import Float32Array
from reference.contract.profiles import profile as find_profile
from reference.formats import FORMATS
from reference.gradients import gradient_contracts
from reference.operators.kv_cache import DenseKeyValues, KeyValues
from reference.primitives import RopeParameters, inverse_frequencies
from reference.rounding import round_to

Tensor = Any


class ArrayOperators(ArrayGradients):
    """`integration.backends.interface.Operators` in NumPy; what an engine on a CPU needs beside it is here too.

    Args:
        profile: name of a strict profile.
        dtype: torch dtype of the model.

    Raises:
        ValueError: an unknown profile, or one that describes an engine.
    """

    def __init__(self, profile: str, dtype: Any) -> None:
        self.profile = find_profile(check_profile(profile))
        self.dtype = dtype
        name = dtype_name(dtype)
        self.contracts: dict[str, Any] = {**self.profile.contracts(name), **gradient_contracts(self.profile, name)}
        self.calls: Counter[str] = Counter()
        #: The functions behind the operators: the reference's, or the same with compiled loops.
        self._ops: Any = _loops() if self.profile.name == STRICT[0] else ops
        #: Positions and table of the last rotation.
        self._rotated: tuple[Any, ops.RopeTable] | None = None
        self._back: Any = reference_gradients
        if self._ops is not ops:
            from integration.backends.loops import gradients

            self._back = gradients
        self._rope_table: tuple[tuple[Any, ...], ops.RopeTable] | None = None

    def __deepcopy__(self, memo: Any) -> ArrayOperators:
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

    def clear(self) -> None:
        """Count from zero."""
        self.calls.clear()

    def whole_table(self, head_dim: int, theta: float | RopeParameters, length: int) -> None:
        """None: on a CPU the positions of a forward are known, and a table of them is enough."""

    def weight(self, weight: Tensor) -> Float32Array:
        """A weight [outputs, inputs] as the products read it fastest: float32, columns contiguous."""
        return np.asfortranarray(to_array(weight))

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

    def rms_norm_residual(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """`residual_add`, and `rms_norm` of that sum."""
        total = self.residual_add(x, residual)
        return self.rms_norm(total, weight, epsilon), total

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
        """Projection of ``x`` [..., inputs] by ``weight`` [outputs, inputs] (see `weight`)."""
        y = self._ops.linear(_rows(x), weight, self._called("linear"), None if bias is None else to_array(bias))
        return self._out(y).reshape(*x.shape[:-1], weight.shape[0])

    def row_linear(self, x: Tensor, weight: Float32Array, bias: Tensor | None = None) -> Tensor:
        """A row-parallel projection on one rank."""
        return self.row_linear_merge([self.row_linear_partial(x, weight, 1)], bias)

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

    def rotate(self, x: Tensor, positions: Tensor, table: ops.RopeTable) -> Tensor:
        """Rotate ``x`` [tokens, heads, head_dim] by the table of its ``positions``; features behind those that the
        table is made for stay as they are.
        """
        self._rotated = positions.detach().cpu().numpy(), table
        values, dim = to_array(x), 2 * table.cos.shape[-1]
        if dim == values.shape[-1]:
            return self._out(self._ops.rope(values, table, self._called("rope")))
        turned = self._ops.rope(np.ascontiguousarray(values[..., :dim]), table, self._called("rope"))
        return self._out(np.concatenate([turned, values[..., dim:]], axis=-1))

    def given_table(self, cos: Tensor, sin: Tensor) -> ops.RopeTable:
        """The table [tokens, head_dim / 2] of an engine changed while it lived, in the contract's precision."""
        form = self.contracts["rope"].precision.table
        parts = (np.ascontiguousarray(part.detach().cpu().float().numpy()) for part in (cos, sin))
        return ops.RopeTable(*(part if form == "float32" else round_to(part, FORMATS[form]) for part in parts))

    def rope_table(
        self, positions: Tensor, head_dim: int, theta: float | RopeParameters, length: int = 0
    ) -> ops.RopeTable:
        """Cosines and sines, float32 arrays [tokens, head_dim / 2], of ``positions`` [tokens]."""
        where = positions.detach().cpu().numpy().astype(np.int64, copy=False)
        key = (where.tobytes(), head_dim, theta, self.contracts["rope"])
        if self._rope_table is None or self._rope_table[0] != key:
            # Every layer of a forward rotates by the same positions.
            self._rope_table = key, self._ops.rope_table(where, head_dim, theta, self.contracts["rope"])
        return self._rope_table[1]

    def live_rope(self) -> dict[str, Any] | None:
        """What the last rotation read, for the record of a capture: the rows of its table by position, and frequencies
        [head_dim / 2] and attention factor where the table is the specification's; None if nothing was rotated.
        """
        if self._rotated is None:
            return None
        positions, table = self._rotated
        frequencies = factor = None
        if self._rope_table is not None and self._rope_table[1] is table:
            _, dim, theta, _ = self._rope_table[0]
            rope = theta if isinstance(theta, RopeParameters) else RopeParameters(float(theta))
            frequencies, factor = inverse_frequencies(dim, rope), rope.attention_factor
        where, first = np.unique(positions, return_index=True)
        rows = {"positions": where, "cos": table.cos[first], "sin": table.sin[first]}
        return {"frequencies": frequencies, "attention_factor": factor, **rows}

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

    def moe_scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What is ranked and what weights are gathered from, float32 [tokens, experts] each."""
        found = ops.moe_scores(to_array(logits), self._called("moe_router"))
        return to_tensor(found.ranked, _float32()), to_tensor(found.scores, _float32())

    def moe_choice(self, ranked: Tensor, k: int) -> Tensor:
        """The ``k`` experts that rank highest, int64 [tokens, k], best first."""
        import torch

        return torch.from_numpy(ops.moe_choice(to_array(ranked), k, self.contracts["moe_router"]))

    def moe_weights(self, scores: Tensor, experts: Tensor) -> Tensor:
        """What each chosen expert weighs, float32 [tokens, k]."""
        found = ops.moe_weights(to_array(scores), experts.numpy(), self.contracts["moe_router"])
        return to_tensor(found, _float32())

    def moe_combine(self, outputs: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Weighted sum [tokens, hidden] of ``outputs`` [tokens, k, hidden]."""
        contract = self._called("moe_combine")
        return self._out(ops.moe_combine(to_array(outputs), to_array(weights), experts.numpy(), contract))

    def lm_head(self, x: Tensor, weight: Float32Array) -> Tensor:
        """Logits [..., outputs], float32."""
        y = self._ops.lm_head(_rows(x), weight, self._called("lm_head"))
        return to_tensor(y, _float32()).reshape(*x.shape[:-1], weight.shape[0])

    def processed_logits(
        self,
        logits: Tensor,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor | None = None,
        top_p: float | Tensor | None = None,
    ) -> Tensor:
        """Scaled and masked logits [rows, vocabulary], float32; rows that share settings are computed together."""
        import torch

        contract, settings = self._called("processed_logits"), (temperature, top_k, top_p)

        def process(rows: Tensor, one: tuple[float, int | None, float | None]) -> Tensor:
            return to_tensor(self._ops.processed_logits(to_array(rows), contract, *one), _float32())

        rows, vocabulary = logits.shape
        columns = [s if isinstance(s, list) else [s] * rows for s in (_plain(setting) for setting in settings)]
        if not rows:
            return torch.empty_like(logits)
        keys = [(t, None if k is None or k >= vocabulary else int(k), p) for t, k, p in zip(*columns, strict=True)]
        return by_group(logits, keys, process)

    def logsumexp(self, logits: Tensor) -> Logsumexp:
        """Log-sum-exp of the rows of ``logits`` [rows, vocabulary]."""
        found = self._ops.logsumexp(to_array(logits), self._called("logsumexp"))
        return Logsumexp(*(to_tensor(np.ascontiguousarray(part), _float32()) for part in found))

    def logprob(self, logits: Tensor, targets: Tensor, lse: Logsumexp) -> Tensor:
        """Log-probability [rows] of integer ``targets`` [rows], float32."""
        chosen = targets.detach().cpu().numpy()
        contract = self._called("logprob")
        return to_tensor(self._ops.logprob(to_array(logits), chosen, _arrays(lse), contract), _float32())

    def all_logprobs(self, logits: Tensor, lse: Logsumexp) -> Tensor:
        """Log-probability of every token [rows, vocabulary]: the operator sees each logit as a row of its own."""
        values = to_array(logits)
        width = values.shape[1]
        spread = ops.LogsumexpResult(*(np.repeat(part, width) for part in _arrays(lse)))
        column, target = values.reshape(-1, 1), np.zeros(values.size, np.int64)
        return to_tensor(self._ops.logprob(column, target, spread, self._called("logprob")), _float32()).reshape(
            logits.shape
        )

    def entropy(self, logits: Tensor, lse: Logsumexp) -> Tensor:
        """Entropy [rows] of the softmax of ``logits`` [rows, vocabulary], float32, in nats."""
        contract = self._called("entropy")
        return to_tensor(ops.entropy(to_array(logits), _arrays(lse), contract, self.contracts["logsumexp"]), _float32())

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Attention of whole sequences over all keys or the ``window`` newest: q [tokens, batch, heads, head_dim], k
        and v with their KV heads.
        """
        import torch

        positions = np.arange(q.shape[0])
        rows = [
            self.attention(q[:, b], positions, DenseKeyValues(to_array(k[:, b]), to_array(v[:, b])), None, window)
            for b in range(q.shape[1])
        ]
        return torch.stack(rows, dim=1)

    def _called(self, operator: str) -> Any:
        """Count one call; the operator's contract."""
        self.calls[operator] += 1
        return self.contracts[operator]

    def _out(self, values: Float32Array) -> Tensor:
        return to_tensor(values, self.dtype)


def _loops() -> Any:
    """The compiled loops, or the reference's where numba is not installed or ``RLK_COMPILED`` is 0."""
    if os.environ.get("RLK_COMPILED") == "0" or find_spec("numba") is None:
        return ops
    from integration.backends import loops

    return loops


def by_group(logits: Tensor, keys: list[Any], function: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """``function(rows, key)`` of all rows that share a key, put back in order."""
    import torch

    distinct = list(dict.fromkeys(keys))
    if len(distinct) == 1:
        return function(logits, distinct[0])
    result = torch.empty_like(logits)
    for key in distinct:
        rows = torch.tensor([i for i, other in enumerate(keys) if other == key])
        result[rows] = function(logits[rows], key)
    return result


def _plain(setting: Any) -> Any:
    """A number, None, or the list of a tensor's numbers."""
    return setting.tolist() if hasattr(setting, "tolist") else setting


def _arrays(lse: Logsumexp) -> ops.LogsumexpResult:
    return ops.LogsumexpResult(*(to_array(part) for part in lse))


def _rows(x: Tensor) -> Float32Array:
    return to_array(x).reshape(-1, x.shape[-1])


def _float32() -> Any:
    import torch

    return torch.float32
