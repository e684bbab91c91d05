"""The boundaries of a decoder, and the dataflow graph that gives "first" its meaning.

A boundary is the output of one operator as a logical global tensor [rows, width]: rows ordered by (sample, position),
packing, paging, batching and sharding undone. Names follow the Hugging Face module tree.

An expert's boundaries have a row for every token, NaN where the router did not choose it for that token: two engines
are joined by (sample, position, expert), in whatever order they dispatched. Chosen experts are whole numbers in
float32, ascending; their weights have a column for every expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from reference.models.config import ModelConfig

#: Which rows an operator computes: every position that is fed forward, or only those that predict a response token.
RowSet = Literal["all", "response"]
#: How a tensor-parallel engine lays the width out: a full copy on each rank, or one slice a rank.
Layout = Literal["replicated", "column"]


@dataclass(frozen=True)
class Boundary:
    """One node of the dataflow graph."""

    name: str
    #: Name of the operator in `reference.operators` whose output this is.
    operator: str
    #: Boundaries this one is computed from, besides weights and token ids.
    inputs: tuple[str, ...]
    #: Elements per row.
    width: int
    layer: int | None = None
    rows: RowSet = "all"
    layout: Layout = "replicated"
    #: Inputs of which a row reads every earlier position of its sample too (attention's keys and values).
    history_inputs: tuple[str, ...] = ()
    #: What a fusing engine reads in place of an input: vLLM's norm takes the unrounded sum of the residual's two terms,
    #: so its output can differ although the rounded sum does not. A row with such a difference is not called an origin.
    fused_inputs: tuple[str, ...] = ()
    #: Whether the tensor holds one slice per rank before the reduction (compared only at equal tensor parallelism).
    partial: bool = False


def graph(config: ModelConfig, tensor_parallel: int = 1) -> list[Boundary]:
    """All boundaries of ``config`` in topological order.

    With ``tensor_parallel`` > 1 the row-parallel operators gain a ``.partial`` boundary of width ranks * hidden_size:
    each rank's contribution before the reduction, in rank order.
    """
    return list(_walk(config, tensor_parallel))


def _walk(c: ModelConfig, tp: int) -> Iterator[Boundary]:
    yield Boundary("embed_tokens", "embedding", (), c.hidden_size)
    stream: str = "embed_tokens"
    terms: tuple[str, ...] = ()
    for n in range(c.num_hidden_layers):
        yield from _layer(c, tp, n, stream, terms)
        stream, terms = f"layers.{n}.mlp_residual", (f"layers.{n}.attn_residual", branch_of(c, n))
    yield Boundary("norm", "rms_norm", (stream,), c.hidden_size, fused_inputs=terms)
    vocab = c.vocab_size
    yield Boundary("logits", "lm_head", ("norm",), vocab, rows="response", layout="column")
    yield Boundary("processed_logits", "processed_logits", ("logits",), vocab, rows="response", layout="column")
    yield Boundary("logsumexp", "logsumexp", ("processed_logits",), 1, rows="response")
    yield Boundary("logprobs", "logprob", ("processed_logits", "logsumexp"), 1, rows="response")


def _layer(c: ModelConfig, tp: int, n: int, stream: str, terms: tuple[str, ...]) -> Iterator[Boundary]:
    """One layer. ``stream`` is the residual stream it reads, ``terms`` the two boundaries that it is the sum of."""
    layer = f"layers.{n}"
    attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"

    def node(name: str, operator: str, inputs: tuple[str, ...], width: int, **kwargs: object) -> Boundary:
        return Boundary(name, operator, inputs, width, layer=n, **kwargs)  # type: ignore[arg-type]

    norm_in = f"{layer}.input_layernorm"
    yield node(norm_in, "rms_norm", (stream,), c.hidden_size, fused_inputs=terms)
    yield node(f"{attn}.q_proj", "linear", (norm_in,), c.q_size, layout="column")
    yield node(f"{attn}.k_proj", "linear", (norm_in,), c.kv_size, layout="column")
    yield node(f"{attn}.v_proj", "linear", (norm_in,), c.kv_size, layout="column")
    q, k = f"{attn}.q_proj", f"{attn}.k_proj"
    if c.qk_norm:
        yield node(f"{attn}.q_norm", "qk_norm", (q,), c.q_size, layout="column")
        yield node(f"{attn}.k_norm", "qk_norm", (k,), c.kv_size, layout="column")
        q, k = f"{attn}.q_norm", f"{attn}.k_norm"
    yield node(f"{attn}.q_rope", "rope", (q,), c.q_size, layout="column")
    yield node(f"{attn}.k_rope", "rope", (k,), c.kv_size, layout="column")
    yield node(f"{attn}.k_cache", "kv_cache", (f"{attn}.k_rope",), c.kv_size, layout="column")
    yield node(f"{attn}.v_cache", "kv_cache", (f"{attn}.v_proj",), c.kv_size, layout="column")
    caches = (f"{attn}.k_cache", f"{attn}.v_cache")
    yield node(
        f"{attn}.attention", "attention", (f"{attn}.q_rope", *caches), c.q_size, layout="column", history_inputs=caches
    )
    yield from _row_parallel(f"{attn}.o_proj", f"{attn}.attention", c, tp, n)
    yield node(f"{layer}.attn_residual", "residual_add", (stream, f"{attn}.o_proj"), c.hidden_size)
    norm_post = f"{layer}.post_attention_layernorm"
    terms = (stream, f"{attn}.o_proj")
    yield node(norm_post, "rms_norm", (f"{layer}.attn_residual",), c.hidden_size, fused_inputs=terms)
    if c.is_sparse(n):
        yield from _experts(c, tp, n, mlp, norm_post)
    else:
        yield from _mlp(c, tp, n, mlp, (norm_post,), c.intermediate_size)
    residual = (f"{layer}.attn_residual", branch_of(c, n))
    yield node(f"{layer}.mlp_residual", "residual_add", residual, c.hidden_size)


def branch_of(config: ModelConfig, layer: int) -> str:
    """The boundary that the MLP of ``layer`` adds to the residual stream."""
    return f"layers.{layer}.mlp." + ("combine" if config.is_sparse(layer) else "down_proj")


def _mlp(c: ModelConfig, tp: int, n: int, name: str, inputs: tuple[str, ...], width: int) -> Iterator[Boundary]:
    gate, up, act = f"{name}.gate_proj", f"{name}.up_proj", f"{name}.act"
    yield Boundary(gate, "linear", inputs, width, layer=n, layout="column")
    yield Boundary(up, "linear", inputs, width, layer=n, layout="column")
    yield Boundary(act, "swiglu", (gate, up), width, layer=n, layout="column")
    yield from _row_parallel(f"{name}.down_proj", act, c, tp, n)


def _experts(c: ModelConfig, tp: int, n: int, mlp: str, source: str) -> Iterator[Boundary]:
    """A router, what it chose, the experts one after the other, and their sum."""
    gate, scores, chosen, weights = (f"{mlp}.{x}" for x in ("gate", "scores", "topk_experts", "topk_weights"))
    yield Boundary(gate, "linear", (source,), c.num_experts, layer=n)
    yield Boundary(scores, "moe_router", (gate,), c.num_experts, layer=n)
    yield Boundary(chosen, "moe_router", (gate, scores), c.num_experts_per_tok, layer=n)
    yield Boundary(weights, "moe_router", (scores, chosen), c.num_experts, layer=n)
    outputs = []
    for e in range(c.num_experts):
        own = f"{mlp}.experts.{e}"
        yield Boundary(f"{own}.input", "moe_dispatch", (source, chosen), c.hidden_size, layer=n)
        yield from _mlp(c, tp, n, own, (f"{own}.input",), c.moe_intermediate_size)
        outputs.append(f"{own}.down_proj")
    yield Boundary(f"{mlp}.combine", "moe_combine", (weights, *outputs), c.hidden_size, layer=n)


def _row_parallel(name: str, source: str, c: ModelConfig, tp: int, layer: int) -> Iterator[Boundary]:
    if tp == 1:
        yield Boundary(name, "row_linear", (source,), c.hidden_size, layer=layer)
        return
    partial = f"{name}.partial"
    yield Boundary(partial, "row_linear", (source,), tp * c.hidden_size, layer=layer, layout="column", partial=True)
    yield Boundary(name, "all_reduce", (partial,), c.hidden_size, layer=layer)
