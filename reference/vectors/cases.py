"""The inputs of the conformance vectors, and how each operator is run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import operators as ops
from reference.contract.base import Contract, fields
from reference.vectors.values import SPECIAL, integers, normal, special, special_values, wide

Arrays = dict[str, NDArray[Any]]
#: Names of the kinds of values, and the functions that make them.
KINDS: dict[str, Callable[..., Any]] = {"normal": normal, "wide": wide, "special": special}


@dataclass(frozen=True)
class Case:
    """Inputs of one call of one operator."""

    operator: str
    name: str
    inputs: Arrays
    #: Scalars of the call: epsilon, temperature, ...
    attributes: Mapping[str, Any] = field(default_factory=dict)


def cases(operator: str, dtype: str) -> Iterator[Case]:
    """The cases of ``operator`` for a model held in ``dtype``: variants have normal values only.

    Raises:
        KeyError: unknown operator.
    """
    for kind, values in KINDS.items():
        for variant, (inputs, attributes) in _INPUTS[operator](_Maker(operator, kind, values, dtype)).items():
            if kind == "normal" or not variant:
                yield Case(operator, f"{kind}{variant}", inputs, attributes)


def run(case: Case, contract: Contract) -> Arrays:
    """The outputs of ``case`` under ``contract``, by name."""
    return _RUNS[case.operator](contract, case.inputs, case.attributes)


def run_unrounded(case: Case, contract: Contract) -> Arrays:
    """The outputs of ``case`` if the contract did not round them; empty if it does not."""
    path = "rounding.output"
    if path not in fields(type(contract)) or contract.get(path) == "float32":
        return {}
    return run(case, contract.override(path, "float32"))


@dataclass(frozen=True)
class _Maker:
    """Makes arrays of one kind in one format."""

    operator: str
    kind: str
    values: Callable[..., Any]
    dtype: str

    def __call__(self, name: str, *shape: int, dtype: str | None = None, tame: bool = False) -> Any:
        """An array; ``tame`` asks for normal values whatever the kind."""
        make = normal if tame else self.values
        return make(f"{self.operator}/{self.kind}/{name}", shape, dtype or self.dtype)

    def rows(self, name: str, rows: int, size: int) -> Any:
        """Rows to be reduced. Special ones are normal rows with one special value each: more would leave only NaN."""
        if self.kind != "special":
            return self(name, rows, size)
        values = self(name, len(SPECIAL) // 2, size, tame=True)
        for row, value in enumerate(special_values(self.dtype)[::2]):
            values[row, (5 * row) % size] = value
        return values


Inputs = dict[str, tuple[Arrays, dict[str, Any]]]  # variant of a case -> inputs, attributes


def _embedding(make: _Maker) -> Inputs:
    tokens = integers("embedding/tokens", (6,), 12)
    return {"": ({"token_ids": tokens, "table": make("table", 12, 8)}, {})}


def _norm_weight(make: _Maker, size: int) -> Any:
    return make("weight", size, tame=make.kind != "wide")


def _rms_norm(make: _Maker) -> Inputs:
    # 320 columns: one full round of 256 lanes and a part of another; 48: a row shorter than the lanes
    alone = {"x": make.rows("x", 4, 320), "weight": _norm_weight(make, 320)}
    short = {"x": make.rows("short", 4, 48), "weight": _norm_weight(make, 48)}
    added = {**alone, "residual": make("residual", *alone["x"].shape, tame=make.kind != "wide")}
    attributes = {"epsilon": 1e-6}
    return {"": (alone, attributes), "-short": (short, attributes), "-residual": (added, attributes)}


def _qk_norm(make: _Maker) -> Inputs:
    x = make.rows("x", 4, 64)
    return {"": ({"x": x.reshape(-1, 2, 64), "weight": _norm_weight(make, 64)}, {"epsilon": 1e-6})}


def _linear(make: _Maker) -> Inputs:
    tame = make.kind == "special"
    plain = {"x": make.rows("x", 3, 128), "weight": make("weight", 8, 128, tame=tame)}
    return {"": (plain, {}), "-bias": ({**plain, "bias": make("bias", 8, tame=tame)}, {})}


def _lm_head(make: _Maker) -> Inputs:
    return {"": ({"x": make.rows("x", 3, 64), "weight": make("weight", 24, 64, tame=make.kind == "special")}, {})}


def _rope(make: _Maker) -> Inputs:
    positions = np.array([0, 1, 7, 255, 1000], np.int64)
    return {"": ({"x": make("x", 5, 2, 32), "positions": positions}, {"theta": 1e6})}


def _attention(make: _Maker) -> Inputs:
    if make.kind == "normal":
        return {"": (_attention_inputs(make, 130), {}), "-window-sinks": (_sink_inputs(make), {"window": 40})}
    return {"": (_attention_inputs(make, 70), {})}


def _attention_inputs(make: _Maker, length: int) -> Arrays:
    heads, kv_heads, head_dim = 4, 2, 16
    # queries and keys stay tame and values finite: an Inf or NaN there leaves nothing but NaN
    keys = make(f"k{length}", length, kv_heads, head_dim, tame=True)
    values = make(f"v{length}", length, kv_heads, head_dim, tame=make.kind == "special")
    if make.kind == "special":
        values[:, 0], keys[3::7] = -0.0, 0.0
    return {
        "q": make(f"q{length}", 5, heads, head_dim, tame=True) * np.float32(2),
        "positions": np.array([0, 1, 63, 64, length - 1], np.int64),
        "k": keys,
        "v": values,
    }


def _sink_inputs(make: _Maker) -> Arrays:
    return {**_attention_inputs(make, 70), "sinks": make("sinks", 4)}


def _swiglu(make: _Maker) -> Inputs:
    return {"": ({"gate": make("gate", 6, 64), "up": make("up", 6, 64)}, {})}


def _residual_add(make: _Maker) -> Inputs:
    return {"": ({"x": make("x", 6, 32), "residual": make("residual", 6, 32)}, {})}


def _logits(make: _Maker) -> Any:
    """Logits [4, 257] without +Inf and NaN rows: 257 columns fill neither lanes nor segments."""
    x = np.asarray(make("logits", 4, 257, dtype="float32"))
    x = np.where(np.isfinite(x) | np.isneginf(x), x, np.float32(1.5))
    return (np.clip(x, -3e38, 3e4) * np.float32(4 if make.kind == "normal" else 1)).astype(np.float32)


def _logsumexp(make: _Maker) -> Inputs:
    return {"": ({"logits": _logits(make)}, {})}


def _logprob(make: _Maker) -> Inputs:
    return {"": ({"logits": _logits(make), "targets": integers("logprob/targets", (4,), 257)}, {})}


def _processed_logits(make: _Maker) -> Inputs:
    x = {"logits": _logits(make)}
    return {
        "": (x, {"temperature": 0.7}),
        "-top-k": (x, {"temperature": 1.0, "top_k": 20}),
        "-top-p": (x, {"temperature": 0.9, "top_k": 200, "top_p": 0.8}),
    }


def _ranks(make: _Maker) -> Inputs:
    shards = {f"rank{i}": make(f"rank{i}", 8, 16, dtype="float32") for i in range(4)}
    return {"": (shards, {})}


def _moe_router(make: _Maker) -> Inputs:
    x = np.asarray(make("logits", 6, 16, dtype="float32"))
    return {"": ({"logits": np.where(np.isfinite(x), x, np.float32(0)).clip(-1e4, 1e4)}, {"k": 4})}


def _moe_combine(make: _Maker) -> Inputs:
    experts = np.argsort(integers("moe_combine/experts", (5, 8), 1 << 30), axis=1)[:, :3].astype(np.int64)
    weights = np.abs(make("weights", 5, 3, dtype="float32", tame=True))
    return {"": ({"outputs": make("outputs", 5, 3, 16), "weights": weights, "experts": experts}, {})}


def _kv_cache(make: _Maker) -> Inputs:
    inputs = {
        "slots": np.array([5, 0, 3, 6, 1], np.int64),
        "keys": make("keys", 5, 2, 8),
        "values": make("values", 5, 2, 8),
        "block_table": np.array([2, 0, 1], np.int64),
    }
    return {"": (inputs, {"pages": 4, "page_size": 2, "length": 5, "key_scale": 0.25, "value_scale": 0.3})}


_INPUTS: dict[str, Callable[[_Maker], Inputs]] = {
    "all_gather": _ranks,
    "all_reduce": _ranks,
    "attention": _attention,
    "embedding": _embedding,
    "entropy": _logsumexp,
    "kv_cache": _kv_cache,
    "linear": _linear,
    "lm_head": _lm_head,
    "logprob": _logprob,
    "logsumexp": _logsumexp,
    "moe_combine": _moe_combine,
    "moe_router": _moe_router,
    "processed_logits": _processed_logits,
    "qk_norm": _qk_norm,
    "reduce_scatter": _ranks,
    "residual_add": _residual_add,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "row_linear": _linear,
    "swiglu": _swiglu,
}


def _shards(x: Arrays) -> list[NDArray[Any]]:
    return [x[name] for name in sorted(x)]


def _run_rms_norm(c: Any, x: Arrays, a: Mapping[str, Any]) -> Arrays:
    result = ops.rms_norm(x["x"], x["weight"], a["epsilon"], c, x.get("residual"))
    return {"output": result.output} | ({} if result.residual is None else {"residual": result.residual})


def _run_rope(c: Any, x: Arrays, a: Mapping[str, Any]) -> Arrays:
    table = ops.rope_table(x["positions"], x["x"].shape[-1], a["theta"], c)
    return {"cos": table.cos, "sin": table.sin, "output": ops.rope(x["x"], table, c)}


def _run_attention(c: Any, x: Arrays, a: Mapping[str, Any]) -> Arrays:
    kv = ops.DenseKeyValues(x["k"], x["v"])
    return {"output": ops.attention(x["q"], x["positions"], kv, c, sinks=x.get("sinks"), **a)}


def _run_logprob(c: Any, x: Arrays, a: Mapping[str, Any]) -> Arrays:
    lse = ops.logsumexp(x["logits"], ops.LogsumexpContract())
    return {"output": ops.logprob(x["logits"], x["targets"], lse, c)}


def _run_entropy(c: Any, x: Arrays, a: Mapping[str, Any]) -> Arrays:
    sums = ops.LogsumexpContract()
    return {"output": ops.entropy(x["logits"], ops.logsumexp(x["logits"], sums), c, sums)}


def _run_kv_cache(c: Any, x: Arrays, a: Mapping[str, Any]) -> Arrays:
    heads, head_dim = x["keys"].shape[1:]
    cache = ops.empty_cache(a["pages"], a["page_size"], heads, head_dim, a["key_scale"], a["value_scale"])
    table = ops.PagedKeyValues(cache, x["block_table"], a["length"], c)
    ops.write_cache(cache, table.slots(0, a["length"]), x["keys"], x["values"], c)
    keys, values = table.read(0, a["length"])
    return {"keys": keys, "values": values}


_RUNS: dict[str, Callable[[Any, Arrays, Mapping[str, Any]], Arrays]] = {
    "all_gather": lambda c, x, a: {"output": ops.all_gather(_shards(x), c)},
    "all_reduce": lambda c, x, a: {"output": ops.all_reduce(_shards(x), c)},
    "attention": _run_attention,
    "embedding": lambda c, x, a: {"output": ops.embedding(x["token_ids"], x["table"], c)},
    "entropy": _run_entropy,
    "kv_cache": _run_kv_cache,
    "linear": lambda c, x, a: {"output": ops.linear(x["x"], x["weight"], c, x.get("bias"))},
    "lm_head": lambda c, x, a: {"output": ops.lm_head(x["x"], x["weight"], c)},
    "logprob": _run_logprob,
    "logsumexp": lambda c, x, a: dict(ops.logsumexp(x["logits"], c)._asdict()),
    "moe_combine": lambda c, x, a: {"output": ops.moe_combine(x["outputs"], x["weights"], x["experts"], c)},
    "moe_router": lambda c, x, a: dict(ops.moe_router(x["logits"], a["k"], c, x.get("bias"))._asdict()),
    "processed_logits": lambda c, x, a: {"output": ops.processed_logits(x["logits"], c, **a)},
    "qk_norm": lambda c, x, a: {"output": ops.qk_norm(x["x"], x["weight"], a["epsilon"], c)},
    "reduce_scatter": lambda c, x, a: {f"rank{i}": chunk for i, chunk in enumerate(ops.reduce_scatter(_shards(x), c))},
    "residual_add": lambda c, x, a: {"output": ops.residual_add(x["x"], x["residual"], c)},
    "rms_norm": _run_rms_norm,
    "rope": _run_rope,
    "row_linear": lambda c, x, a: {"output": ops.row_linear(x["x"], x["weight"], c, x.get("bias"))},
    "swiglu": lambda c, x, a: {"output": ops.swiglu(x["gate"], x["up"], c)},
}
