"""A boundary of one trace as a question: these arguments gave these bits; which contract was it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diffcheck.base.bits import UIntArray, to_float32
from diffcheck.base.boundaries import Boundary, graph
from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample
from diffcheck.infer import arguments as args
from diffcheck.infer.arguments import Arguments
from diffcheck.infer.weights import TracedWeights
from diffcheck.rows import Index, IntArray, Rows, expected_rows
from diffcheck.trace.reader import Trace
from diffcheck.trace.schema import Header
from reference.checks import Float32Array
from reference.contract import CONTRACTS, Value, fields, operator_name
from reference.contract.names import offered
from reference.formats import FORMATS
from reference.models.config import ModelConfig
from reference.rounding import round_to

#: Elements of one boundary that are looked at; beyond, rows are thinned out evenly.
MAX_ELEMENTS = 1 << 26


class UnknowableError(Exception):
    """The trace does not hold what inference needs. The message says what is missing, for the reader of a report."""


@dataclass(frozen=True)
class Site:
    """What one side computed at one boundary, and the fields that its bits could tell."""

    boundary: str
    arguments: Arguments
    #: The side's output patterns, [rows, width].
    target: UIntArray
    dtype: str
    #: Row numbers of the boundary that are looked at, ascending, and how many it has.
    rows: IntArray
    total_rows: int
    #: Dtype of the model, which selects the space.
    model_dtype: str
    #: Facts about the call, no axes of the space: path -> value.
    given: Mapping[str, Value]
    #: Fields that cannot show in these bits: path -> why.
    hidden: Mapping[str, str]


def node_of(trace: Trace, boundary: str) -> Boundary:
    """The boundary's place in the trace's dataflow graph.

    Raises:
        InputError: no such boundary in this model.
    """
    header = trace.header
    nodes = {b.name: b for b in graph(ModelConfig(**header.object.model), header.tensor_parallel)}
    if boundary not in nodes:
        raise InputError(
            f"boundary {boundary!r} is not one of this model",
            offered(boundary, nodes),
        )
    return nodes[boundary]


class Source(Protocol):
    """Where the values of a call come from: a trace, or a forward that is running."""

    @property
    def header(self) -> Header:
        """The object that was computed, and in which phase."""

    @property
    def samples(self) -> Sequence[Sample]: ...

    @property
    def place(self) -> Rows:
        """Sample and position of the rows that can be asked for."""

    def values(self, name: str, rows: IntArray) -> Float32Array:
        """Values of boundary ``name`` in the given rows of ``place``: [rows, width]."""

    def history(self, name: str, sample: int) -> Float32Array:
        """Values of a key or value boundary from position 0 of a sample on: [positions, width]."""


class _Reader:
    """Rows of one trace's boundaries, aligned to a node's own rows."""

    def __init__(self, trace: Trace, node: Boundary) -> None:
        self.trace, self.node, self.header = trace, node, trace.header
        self.samples = [Sample.from_json(s) for s in trace.header.samples]
        self._nodes = {b.name: b for b in graph(ModelConfig(**trace.header.object.model), trace.header.tensor_parallel)}
        self.sets = expected_rows(self.samples)
        #: Sample and position of each row of the node.
        self.place: Rows = self.sets[node.rows]
        self._in_all = Index(self.sets["all"]).find(self.place)

    def require(self, name: str) -> None:
        """Raise UnknowableError unless patterns of ``name`` are in the trace."""
        header = self.trace.header
        if name not in self.trace:
            raise UnknowableError(f"{name} was not observed: {header.unobserved.get(name, 'not captured')}")
        if self.trace.entry(name).level == "digest":
            raise UnknowableError(f"the trace holds only digests of {name}; capture with --level sampled or full")

    def observed(self, name: str) -> bool:
        return name in self.trace and self.trace.entry(name).level != "digest"

    def rows_of(self, name: str, rows: IntArray) -> IntArray:
        """The node's ``rows`` as row numbers of ``name``."""
        source = self._nodes[name].rows
        return self._in_all[rows] if source == "all" and self.node.rows == "response" else rows

    def available(self, names: Sequence[str]) -> IntArray:
        """Rows of the node for which all of ``names`` are stored."""
        rows = np.arange(len(self.place))
        for name in names:
            stored = self.trace.stored_rows(name)
            if stored is not None:
                rows = rows[np.isin(self.rows_of(name, rows), stored)]
        return rows

    def bits(self, name: str, rows: IntArray) -> UIntArray:
        """Patterns of ``name`` for the node's ``rows``."""
        return self.raw(name, self.rows_of(name, rows))

    def raw(self, name: str, wanted: IntArray) -> UIntArray:
        """Patterns of the given row numbers of ``name`` (ascending), read block by block."""
        parts = [bits[np.isin(block, wanted)] for block, bits in self.trace.blocks(name)]
        return np.concatenate(parts)

    def values(self, name: str, rows: IntArray) -> Float32Array:
        return to_float32(self.bits(name, rows), self.trace.entry(name).dtype)

    def history(self, name: str, sample: int) -> Float32Array:
        mine = _stored_prefix(self, self.node, sample)
        return to_float32(self.raw(name, mine), self.trace.entry(name).dtype)


def site(trace: Trace, boundary: str, weights: TracedWeights) -> Site:
    """Read what ``boundary`` was computed from, and what came out.

    Raises:
        InputError: no such boundary; weights that are not the traced ones.
        UnknowableError: the trace does not hold the inputs, or the outputs.
        TraceError: the trace is damaged.
    """
    node = node_of(trace, boundary)
    reader = _Reader(trace, node)
    reader.require(boundary)
    operator = operator_name(boundary if node.operator != "all_reduce" else "all_reduce")
    inputs, hidden = _inputs(reader, node, operator)
    for name in inputs.values():
        reader.require(name)
    rows = reader.available([boundary, *(n for n in inputs.values() if n not in node.history_inputs)])
    if operator == "attention":
        rows = _with_history(reader, node, rows)
    if not rows.size:
        raise UnknowableError("no row of the trace holds both the inputs and the output")
    widest = max(trace.entry(name).shape[1] for name in (boundary, *inputs.values()))
    rows = rows[spread(rows.size, max(1, MAX_ELEMENTS // widest))]
    arguments = arguments_of(reader, node, inputs, rows, weights)
    hidden |= _hidden(arguments, trace.entry(boundary).dtype)
    return Site(
        boundary=boundary,
        arguments=arguments,
        target=reader.bits(boundary, rows),
        dtype=trace.entry(boundary).dtype,
        rows=rows,
        total_rows=len(reader.place),
        model_dtype=trace.header.dtype,
        given=_given(trace, boundary, operator, inputs),
        hidden=hidden,
    )


def spread(size: int, count: int) -> IntArray:
    """At most ``count`` of ``size`` indices, evenly spread, first and last included."""
    return np.unique(np.linspace(0, size - 1, max(0, min(count, size))).round().astype(np.int64))


def _inputs(reader: _Reader, node: Boundary, operator: str) -> tuple[dict[str, str], dict[str, str]]:
    """Argument -> boundary it is read from, and the fields that this hides."""
    match operator:
        case "rms_norm":
            return _norm_inputs(reader, node)
        case "swiglu":
            return {"gate": node.inputs[0], "up": node.inputs[1]}, {}
        case "residual_add":
            return {"residual": node.inputs[0], "x": node.inputs[1]}, {}
        case "attention":
            return {"x": node.inputs[0], "keys": node.inputs[1], "values": node.inputs[2]}, {}
        case "logprob" if reader.observed(node.inputs[1]):
            return {"x": node.inputs[0], "lse": node.inputs[1]}, {}
        case "embedding":
            return {}, {}
        case _:
            return {"x": node.inputs[0]}, {}


def _norm_inputs(reader: _Reader, node: Boundary) -> tuple[dict[str, str], dict[str, str]]:
    """A fusing engine normalises the unrounded sum of two terms, so the terms are the norm's inputs where they were
    observed and really sum up to the residual stream.
    """
    plain, terms = {"x": node.inputs[0]}, node.fused_inputs
    residual = "the residual that the norm hands on is another boundary"
    if not terms:
        no_sum = "no residual is added before this norm"
        return plain, {"rounding.sum": no_sum, "rounding.residual": no_sum}
    both = {"residual": terms[0], "x": terms[1]}
    if not all(reader.observed(name) for name in terms):
        return plain, {
            "rounding.sum": "the two terms of the residual sum were not both observed",
            "rounding.residual": residual,
        }
    if reader.observed(node.inputs[0]) and not _sums_up(reader, node.inputs[0], terms):
        return plain, {
            "rounding.sum": "the observed residual stream is not the sum of its two terms: something replaced it",
            "rounding.residual": residual,
        }
    return both, {"rounding.residual": residual}


def _sums_up(reader: _Reader, total: str, terms: Sequence[str]) -> bool:
    rows = reader.available([total, *terms])
    a, b = (reader.values(name, rows) for name in terms)
    with np.errstate(all="ignore"):
        rounded = round_to(a + b, FORMATS[reader.trace.entry(total).dtype])
    return bool(np.array_equal(rounded, reader.values(total, rows), equal_nan=True))


def _with_history(reader: _Reader, node: Boundary, rows: IntArray) -> IntArray:
    """Rows of which all keys and values that the call saw are stored."""
    sample, position = reader.place.sample[rows], reader.place.position[rows]
    prefix = {s: _stored_prefix(reader, node, s).size for s in np.unique(sample).tolist()}
    whole = np.array([prefix[s] for s in sample.tolist()]) >= _keys_seen(reader, sample, position)
    if not whole.any():
        raise UnknowableError("attention reads all keys of a sample, and the trace holds only some; use --level full")
    return rows[whole]


def _stored_prefix(reader: _Reader, node: Boundary, sample: int) -> IntArray:
    """Row numbers of the sample's keys and values that are stored, from position 0 up to the first gap."""
    mine = np.flatnonzero(reader.sets["all"].sample == sample)
    stored = np.ones(mine.size, np.bool_)
    for name in node.history_inputs:
        kept = reader.trace.stored_rows(name)
        if kept is not None:
            stored &= np.isin(mine, kept)
    prefix: IntArray = mine[np.logical_and.accumulate(stored)]
    return prefix


def operator_inputs(trace: Trace, boundary: str) -> dict[str, str]:
    """Argument -> boundary from which the side that made ``trace`` reads it. A norm that was seen to sum two terms has
    these.

    Raises:
        InputError: no such boundary.
    """
    node = node_of(trace, boundary)
    return _inputs(_Reader(trace, node), node, node.operator)[0]


def arguments_of(
    source: Source, node: Boundary, inputs: Mapping[str, str], rows: IntArray, weights: TracedWeights
) -> Arguments:
    """The call that gives ``rows`` of ``node``.

    Args:
        inputs: argument -> boundary it is read from, see `operator_inputs`.
        rows: indices into ``source.place``.
    """
    header = source.header
    record, operator = header.object, operator_name("all_reduce" if node.operator == "all_reduce" else node.name)
    config = ModelConfig(**record.model)
    sample, position = source.place.sample[rows], source.place.position[rows]
    by_row: dict[str, NDArray[Any]] = {
        name: source.values(boundary, rows) for name, boundary in inputs.items() if boundary not in node.history_inputs
    }
    facts: dict[str, Any] = {"epsilon": config.rms_norm_eps, "head_dim": config.head_dim}
    held: dict[str, Float32Array] = {}
    sequences: dict[int, args.Sequence] = {}
    name = node.name.removesuffix(".partial")
    match operator:
        case "embedding":
            by_row["token"] = _of_record(record.token_ids, sample, position)
            held["weight"] = weights["model.embed_tokens.weight"]
        case "rms_norm" | "qk_norm":
            held["weight"] = weights[f"model.{name}.weight"]
        case "linear" | "row_linear":
            held["weight"] = weights[f"model.{name}.weight"]
            if node.partial:
                facts["ranks"] = header.tensor_parallel
            elif f"model.{name}.bias" in weights:
                held["bias"] = weights[f"model.{name}.bias"]
        case "lm_head":
            tied = config.tie_word_embeddings
            held["weight"] = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        case "all_reduce":
            facts["ranks"] = header.tensor_parallel
        case "rope":
            by_row["position"] = _of_record(record.positions, sample, position)
            # The live table's own parameters where they are known, else those of the model that it should have.
            theta = record.rope.get("theta")
            plain = isinstance(theta, float) and record.rope.get("scaling") == "default"
            facts["theta"], facts["dim"] = theta if plain else config.rope_base, config.rotary_dim
        case "attention":
            by_row |= {"sample": sample, "position": position, "keys": _keys_seen(source, sample, position)}
            sequences = _sequences(source, node, config, np.unique(sample))
            if node.layer is not None and (window := config.window(node.layer)) is not None:
                facts["window"] = window
        case "processed_logits":
            facts["temperature"] = record.temperature
            facts["top_k"] = record.top_k or None
            facts["top_p"] = record.top_p if record.top_p < 1 else None
        case "logprob":
            # A prompt's last position predicts the first target.
            first = np.array([len(s.prompt_token_ids) - 1 for s in source.samples], np.int64)
            by_row["target"] = _of_record(record.target_ids, sample, position - first[sample])
    return Arguments(operator, by_row, held, facts, sequences)


def _of_record(lists: Sequence[Sequence[int]], sample: IntArray, position: IntArray) -> IntArray:
    return np.array([lists[s][p] for s, p in zip(sample.tolist(), position.tolist(), strict=True)], np.int64)


def _keys_seen(source: Source, sample: IntArray, position: IntArray) -> IntArray:
    """Length of the sequence in the call that computed each row: prompts are prefilled whole, the rest is decoded."""
    seen = []
    for s, p in zip(sample.tolist(), position.tolist(), strict=True):
        of = source.samples[s]
        prompt = len(of.prompt_token_ids)
        if source.header.phase == "prefill":
            seen.append(of.forward_length)
        else:
            seen.append(max(p + 1, min(prompt, of.forward_length)))
    return np.array(seen, np.int64)


def _sequences(source: Source, node: Boundary, config: ModelConfig, samples: IntArray) -> dict[int, args.Sequence]:
    shape = (-1, config.num_key_value_heads, config.head_dim)
    found = {}
    for s in samples.tolist():
        keys, values = (source.history(name, s).reshape(shape) for name in node.history_inputs)
        found[s] = args.Sequence(keys, values)
    return found


def _given(trace: Trace, boundary: str, operator: str, inputs: Mapping[str, str]) -> dict[str, Value]:
    """Facts about the call that the trace shows: the formats of what went in and came out."""
    given: dict[str, Value] = {}
    known = fields(CONTRACTS[operator])
    if "rounding.output" in known and known["rounding.output"].given:
        given["rounding.output"] = trace.entry(boundary).dtype
    if boundary.endswith(".partial"):
        given["rounding.output"] = "float32"
    if "domain.input" in known and "x" in inputs:
        given["domain.input"] = trace.entry(inputs["x"]).dtype
    return given


def _hidden(a: Arguments, dtype: str) -> dict[str, str]:
    """Fields that cannot change a bit of this call, with the reason."""
    match a.operator:
        case "rms_norm" | "qk_norm":
            return {}
        case "linear" | "row_linear" | "lm_head":
            return {} if "bias" in a.weights else {"order.bias": "there is no bias"}
        case "attention":
            return {"order.sink": "there are no attention sinks"}
        case "processed_logits":
            return _hidden_sampling(a)
        case "logsumexp" if not (a.rows["x"].view(np.uint32) & 0xFFFF).any():
            return {"rounding.logits": "the logits are values of the narrow format already"}
        case "kv_cache":
            return {"primitives.scale": "the cache has no scale"}
        case "logprob" if "lse" in a.rows:
            return {
                "order.formula": "only the log-sum-exp was observed, not the sum inside it",
                "primitives.exp": "no exponential is taken after the log-sum-exp",
                "primitives.log": "no logarithm is taken after the log-sum-exp",
            }
        case _:
            return {}


def _hidden_sampling(a: Arguments) -> dict[str, str]:
    hidden = {}
    if a.facts["temperature"] == 1.0:
        hidden["primitives.temperature"] = "the temperature is 1"
    if a.facts["top_k"] is None:
        hidden["domain.top_k_ties"] = "top-k is off"
    if a.facts["top_p"] is None:
        off = ("order.top_p", "order.sum", "precision.cumulated", "primitives.exp", "primitives.normalise")
        hidden |= dict.fromkeys(off, "top-p is off")
    if a.facts["top_k"] is None or a.facts["top_p"] is None:
        hidden["order.filters"] = "at most one filter is on"
    return hidden
