"""The arguments with which one side called one operator, in the side's own bits, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffcheck.rows import IntArray
from reference import operators as ops
from reference.checks import Float32Array
from reference.contract import Contract, fields
from reference.formats import FORMATS
from reference.rounding import round_to


@dataclass(frozen=True)
class Sequence:
    """Keys and values of one sample, float32, [tokens, KV heads, head_dim]."""

    keys: Float32Array
    values: Float32Array


@dataclass(frozen=True)
class Arguments:
    """Everything an operator was called with, for chosen rows."""

    operator: str
    #: Per row: float32 or integer arrays whose first axis is rows.
    rows: Mapping[str, NDArray[Any]]
    #: Shared by the rows: weights, float32.
    weights: Mapping[str, Float32Array] = field(default_factory=dict)
    #: Numbers of the model and the call: epsilon, theta, head_dim, temperature, ranks, ...; absent ones are the
    #: operator's own (a scale of 1/sqrt(head_dim), a temperature of 1 inside the log-softmax, no factor of the output).
    facts: Mapping[str, Any] = field(default_factory=dict)
    #: Attention only: keys and values by sample number.
    sequences: Mapping[int, Sequence] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def norm_size(self) -> int:
        """Elements that a norm's mean is taken over; 0 of other operators."""
        sizes = {"rms_norm": self.rows["x"].shape[-1], "qk_norm": self.facts["head_dim"]} if "x" in self.rows else {}
        return int(sizes.get(self.operator, 0))

    def take(self, rows: IntArray, columns: IntArray | None = None) -> Arguments:
        """The call for some rows, and for some outputs where outputs are independent (`COLUMN_OPERATORS`)."""
        weights = self.weights
        if columns is not None:
            weights = {name: np.ascontiguousarray(w[columns]) for name, w in weights.items()}
        return replace(self, rows={name: value[rows] for name, value in self.rows.items()}, weights=weights)


#: Operators whose outputs are independent columns: a search may look at some of them.
COLUMN_OPERATORS = ("linear", "row_linear", "lm_head")


def call(arguments: Arguments, contract: Any) -> Float32Array:
    """The reference operator on ``arguments`` under ``contract``: float32, [rows, width].

    Raises:
        ValueError: the contract is impossible for these shapes or formats.
    """
    with np.errstate(all="ignore"):
        return _scaled(arguments, contract).reshape(len(arguments), -1)


def _scaled(arguments: Arguments, contract: Any) -> Float32Array:
    """The operator's output, times the call's factor where it has one: before its rounding, or behind it."""
    operator, facts = _CALLS[arguments.operator], arguments.facts
    if "factor" in facts:
        return rounded(operator(arguments, contract) * np.float32(facts["factor"]), contract)
    if "divisor" in facts:
        return rounded(operator(arguments, contract) / np.float32(facts["divisor"]), contract)
    if "inner_factor" in facts:
        wide = contract.override("rounding.output", "float32")
        return rounded(operator(arguments, wide) * np.float32(facts["inner_factor"]), contract)
    return operator(arguments, contract)


def rounded(x: Float32Array, contract: Contract) -> Float32Array:
    """``x`` in the format of the contract's output."""
    name = "rounding.output" if "rounding.output" in fields(type(contract)) else "rounding.read"
    return round_to(x, FORMATS[str(contract.get(name))]) if name in fields(type(contract)) else x


def _embedding(a: Arguments, contract: Any) -> Float32Array:
    return ops.embedding(a.rows["token"], a.weights["weight"], contract)


def _rms_norm(a: Arguments, contract: Any) -> Float32Array:
    residual = a.rows.get("residual")
    return ops.rms_norm(a.rows["x"], a.weights["weight"], a.facts["epsilon"], contract, residual).output


def _qk_norm(a: Arguments, contract: Any) -> Float32Array:
    x = a.rows["x"].reshape(len(a), -1, a.facts["head_dim"])
    return ops.qk_norm(x, a.weights["weight"], a.facts["epsilon"], contract)


def _linear(a: Arguments, contract: Any) -> Float32Array:
    return ops.linear(a.rows["x"], a.weights["weight"], contract, a.weights.get("bias"))


def _row_linear(a: Arguments, contract: Any) -> Float32Array:
    """The product or, of several ranks, their partial sums side by side, as the boundary ``.partial`` has them."""
    ranks = a.facts.get("ranks", 1)
    if ranks == 1:
        return _linear(a, contract)
    x, weight = np.split(a.rows["x"], ranks, axis=1), np.split(a.weights["weight"], ranks, axis=1)
    parts = [ops.row_linear_partial(x[r], weight[r], contract, ranks) for r in range(ranks)]
    return np.concatenate(parts, axis=1)


def _all_reduce(a: Arguments, contract: Any) -> Float32Array:
    return ops.all_reduce(np.split(a.rows["x"], a.facts["ranks"], axis=1), contract)


def _rope(a: Arguments, contract: Any) -> Float32Array:
    x = a.rows["x"].reshape(len(a), -1, a.facts["head_dim"])
    table = ops.rope_table(a.rows["position"], a.facts.get("dim", a.facts["head_dim"]), a.facts["theta"], contract)
    return ops.rope(x, table, contract)


def _kv_cache(a: Arguments, contract: Any) -> Float32Array:
    return ops.from_cache(ops.to_cache(a.rows["x"], 1.0, contract), 1.0, contract)


def _attention(a: Arguments, contract: Any) -> Float32Array:
    q = a.rows["x"].reshape(len(a), -1, a.facts["head_dim"])
    out = np.empty_like(q)
    # Rows of one sample that saw the same number of keys were one call of the engine's.
    for sample, visible in sorted({(int(s), int(n)) for s, n in zip(a.rows["sample"], a.rows["keys"], strict=True)}):
        mine = np.flatnonzero((a.rows["sample"] == sample) & (a.rows["keys"] == visible))
        sequence = a.sequences[sample]
        kv = ops.DenseKeyValues(sequence.keys[:visible], sequence.values[:visible])
        where = a.rows["position"][mine]
        out[mine] = ops.attention(
            q[mine], where, kv, contract, scale=a.facts.get("scale"), window=a.facts.get("window")
        )
    return out


def _swiglu(a: Arguments, contract: Any) -> Float32Array:
    return ops.swiglu(a.rows["gate"], a.rows["up"], contract)


def _residual_add(a: Arguments, contract: Any) -> Float32Array:
    x = a.rows["x"]
    if "branch_factor" in a.facts:
        x = rounded(x * np.float32(a.facts["branch_factor"]), contract)
    return ops.residual_add(x, a.rows["residual"], contract)


def _processed_logits(a: Arguments, contract: Any) -> Float32Array:
    f = a.facts
    return ops.processed_logits(a.rows["x"], contract, f["temperature"], f["top_k"], f["top_p"])


def _logsumexp(a: Arguments, contract: Any) -> Float32Array:
    return ops.logsumexp(_tempered(a), contract).value


def _tempered(a: Arguments) -> Float32Array:
    """The logits of a log-softmax that divides them by a temperature of its own."""
    x: Float32Array = a.rows["x"]
    return x / np.float32(a.facts["inner_temperature"]) if "inner_temperature" in a.facts else x


def _logprob(a: Arguments, contract: Any) -> Float32Array:
    """With the observed log-sum-exp, whose sum is not known; where none was observed, with the one that
    ``facts["logsumexp"]``, a contract, gives.
    """
    x = _tempered(a)
    if "lse" in a.rows:
        value = a.rows["lse"][:, 0]
        lse = ops.LogsumexpResult(value, x.max(axis=1), np.full_like(value, np.nan))
    else:
        lse = ops.logsumexp(x, a.facts["logsumexp"])
    return ops.logprob(x, a.rows["target"], lse, contract)


_CALLS: dict[str, Callable[[Arguments, Contract], Float32Array]] = {
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "qk_norm": _qk_norm,
    "linear": _linear,
    "row_linear": _row_linear,
    "lm_head": _linear,
    "all_reduce": _all_reduce,
    "rope": _rope,
    "kv_cache": _kv_cache,
    "attention": _attention,
    "swiglu": _swiglu,
    "residual_add": _residual_add,
    "processed_logits": _processed_logits,
    "logsumexp": _logsumexp,
    "logprob": _logprob,
}
