"""Forward of a decoder (Qwen3, Qwen2, Llama, Qwen3-MoE) made of the reference operators, over a paged KV cache.

Prefill and decode run the same layers on different sets of rows: prefill feeds whole prompts, or chunks of them, decode
one token per sequence and step. Every boundary passes through an observer, which may replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import operators as ops
from reference.checks import Float32Array
from reference.contract.profiles import Profile
from reference.models.config import ModelConfig
from reference.models.contracts import Overrides, resolve_contracts
from reference.models.rows import PagedState, Phase, Rows, check_batch, schedule
from reference.models.weights import check_weights

#: ``observe(boundary, sample [rows], position [rows], values [rows, width])`` returns a replacement or None.
Observer = Callable[[str, NDArray[np.int64], NDArray[np.int64], Float32Array], Float32Array | None]
#: `Qwen3._see`, or what stands for it where a boundary has rows that an operator does not compute.
_See = Callable[[str, Rows, Float32Array], Float32Array]


@dataclass(frozen=True)
class Sampling:
    """What happens to logits before the log-softmax."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


@dataclass
class Qwen3:
    """A model ready to run: weights, shape, contracts. All methods leave it unchanged.

    Args:
        weights: Hugging Face names to float32 arrays, each value one of ``dtype`` (norm weights may be wider).
        profile: the contracts.
        dtype: format of weights and activations: bfloat16, float16 or float32.
        tensor_parallel: number of virtual ranks that row-parallel projections are spread over.
        overrides: boundary pattern (``layers.*.mlp.act``) to contract fields (``rounding.silu``) that differ there.
        observe: see :data:`Observer`.

    Raises:
        ValueError: a weight is missing or of another shape; an override names no boundary, field or value; sizes that
            ``tensor_parallel`` does not divide.
        TypeError: a weight is not a native float32 array.
    """

    weights: Mapping[str, Float32Array]
    config: ModelConfig
    profile: Profile
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    overrides: Overrides = field(default_factory=dict)
    observe: Observer | None = None
    #: Boundary -> its contract, overrides applied.
    contracts: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_weights(self.weights, self.config)
        widths = ["intermediate_size"] if self.config.num_experts == 0 or self.config.dense_layers else []
        widths += ["moe_intermediate_size"] if self.config.num_experts else []
        for what in ("num_attention_heads", "num_key_value_heads", *widths):
            if getattr(self.config, what) % self.tensor_parallel:
                raise ValueError(f"tensor_parallel: {self.tensor_parallel} does not divide {what}")
        self.contracts = resolve_contracts(self.config, self.profile, self.dtype, self.overrides)

    def hidden(self, rows: Rows, state: PagedState) -> Float32Array:
        """The final norm's output of ``rows`` [rows, hidden]; their keys and values join ``state``."""
        table = self._weight("model.embed_tokens.weight")
        stream = self._see("embed_tokens", rows, ops.embedding(rows.token, table, self.contracts["embed_tokens"]))
        branch: Float32Array | None = None  # what the next norm adds to the stream
        for n in range(self.config.num_hidden_layers):
            layer = f"layers.{n}"
            stream, normed = self._norm(
                f"{layer}.input_layernorm", f"layers.{n - 1}.mlp_residual", rows, stream, branch
            )
            branch = self._attention_block(layer, n, rows, normed, state)
            stream, normed = self._norm(
                f"{layer}.post_attention_layernorm", f"{layer}.attn_residual", rows, stream, branch
            )
            mlp = self._experts if self.config.is_sparse(n) else self._mlp
            branch = mlp(f"{layer}.mlp", rows, normed)
        last = f"layers.{self.config.num_hidden_layers - 1}.mlp_residual"
        return self._norm("norm", last, rows, stream, branch)[1]

    def logits(self, hidden: Float32Array, rows: Rows, sampling: Sampling) -> Float32Array:
        """Processed logits of ``rows`` [rows, vocabulary]."""
        tied = self.config.tie_word_embeddings
        head = self._weight("model.embed_tokens.weight" if tied else "lm_head.weight")
        logits = self._see("logits", rows, ops.lm_head(hidden, head, self.contracts["logits"]))
        contract = self.contracts["processed_logits"]
        processed = ops.processed_logits(logits, contract, sampling.temperature, sampling.top_k, sampling.top_p)
        return self._see("processed_logits", rows, processed)

    def logprobs(self, logits: Float32Array, targets: NDArray[np.int64], rows: Rows) -> Float32Array:
        """Log-probability [rows] of ``targets`` under processed logits."""
        lse = ops.logsumexp(logits, self.contracts["logsumexp"])
        lse = lse._replace(value=self._see("logsumexp", rows, lse.value[:, None])[:, 0])
        contract = self.contracts["logprobs"]
        return self._see("logprobs", rows, ops.logprob(logits, targets, lse, contract)[:, None])[:, 0]

    def _norm(
        self, name: str, residual_name: str, rows: Rows, stream: Float32Array, branch: Float32Array | None
    ) -> tuple[Float32Array, Float32Array]:
        """Add ``branch`` to the residual stream and normalise; the new stream and the norm's output."""
        weight = self._weight(f"model.{name}.weight")
        epsilon, contract = self.config.rms_norm_eps, self.contracts[name]
        added = stream
        if branch is not None:
            total = ops.residual_add(branch, stream, self.contracts[residual_name])
            added = self._see(residual_name, rows, total)
            if contract.rounding.sum == "float32":
                # engines that fuse add and norm see an unrounded sum; a row that an observer replaced is taken as it is
                normed = ops.rms_norm(branch, weight, epsilon, contract, stream).output
                replaced = (added.view(np.uint32) != total.view(np.uint32)).any(axis=1)
                if replaced.any():
                    normed[replaced] = ops.rms_norm(added[replaced], weight, epsilon, contract).output
                return added, self._see(name, rows, normed)
        return added, self._see(name, rows, ops.rms_norm(added, weight, epsilon, contract).output)

    def _attention_block(self, layer: str, n: int, rows: Rows, x: Float32Array, state: PagedState) -> Float32Array:
        name, c = f"{layer}.self_attn", self.config
        q, k, v = (self._column(f"{name}.{part}_proj", rows, x) for part in "qkv")
        q, k, v = (part.reshape(len(rows), -1, c.head_dim) for part in (q, k, v))
        if c.qk_norm:
            q, k = self._head_norm(f"{name}.q_norm", rows, q), self._head_norm(f"{name}.k_norm", rows, k)
        q, k = self._rope(f"{name}.q_rope", rows, q), self._rope(f"{name}.k_rope", rows, k)
        self._write_cache(name, n, rows, k, v, state)
        contract = self.contracts[f"{name}.attention"]
        out = np.empty_like(q)
        for sample, mine in rows.by_sample():
            kv = state.key_values(n, sample, int(rows.position[mine].max()) + 1, self.contracts[f"{name}.k_cache"])
            out[mine] = ops.attention(q[mine], rows.position[mine], kv, contract, window=self.config.window(n))
        attended = self._see(f"{name}.attention", rows, out.reshape(len(rows), -1))
        return self._row(f"{name}.o_proj", rows, attended)

    def _mlp(self, name: str, rows: Rows, x: Float32Array, see: _See | None = None) -> Float32Array:
        see = see or self._see
        gate = self._column(f"{name}.gate_proj", rows, x, see)
        up = self._column(f"{name}.up_proj", rows, x, see)
        act = see(f"{name}.act", rows, ops.swiglu(gate, up, self.contracts[f"{name}.act"]))
        return self._row(f"{name}.down_proj", rows, act, see)

    def _experts(self, name: str, rows: Rows, x: Float32Array) -> Float32Array:
        """A mixture of experts: each token through those that its router chose, and their weighted sum."""
        number, k = self.config.num_experts, self.config.num_experts_per_tok
        router = self.contracts[f"{name}.scores"]
        logits = self._column(f"{name}.gate", rows, x)
        ranked, computed = ops.moe_scores(logits, router)
        scores = self._see(f"{name}.scores", rows, computed)
        if router.order.rank == "scores":
            ranked = scores
        experts = self._choice(f"{name}.topk_experts", rows, ops.moe_choice(ranked, k, router))
        every = np.arange(len(rows))[:, None]
        weights = np.full((len(rows), number), np.nan, np.float32)
        weights[every, experts] = ops.moe_weights(scores, experts, router)
        weights = self._see(f"{name}.topk_weights", rows, weights)
        outputs = np.empty((len(rows), k, self.config.hidden_size), np.float32)
        for e in range(number):
            token, slot = np.nonzero(experts == e)
            if token.size or self.observe is not None:
                outputs[token, slot] = self._expert(f"{name}.experts.{e}", rows, token, x[token])
        contract = self.contracts[f"{name}.combine"]
        return self._see(f"{name}.combine", rows, ops.moe_combine(outputs, weights[every, experts], experts, contract))

    def _expert(self, name: str, rows: Rows, token: NDArray[np.int64], x: Float32Array) -> Float32Array:
        """One expert on the rows of ``token``. Its boundaries have a row for every token: NaN where it was not chosen,
        so that two engines are joined by (sample, position, expert), whatever they dispatched with what.
        """

        def see(boundary: str, _rows: Rows, values: Float32Array) -> Float32Array:
            if self.observe is None:
                return values
            whole = np.full((len(rows), values.shape[1]), np.nan, np.float32)
            whole[token] = values
            return self._see(boundary, rows, whole)[token]

        x = see(f"{name}.input", rows, x)
        return self._mlp(name, rows, x, see)

    def _choice(self, name: str, rows: Rows, experts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Show the chosen experts as ascending whole numbers; where an observer replaced them, they are the choice."""
        ascending = np.sort(experts, axis=1).astype(np.float32)
        seen = self._see(name, rows, ascending)
        changed = (seen != ascending).any(axis=1)
        if not changed.any():
            return experts
        number, new = self.config.num_experts, seen[changed]
        if not ((new == np.floor(new)) & (new >= 0) & (new < number)).all() or (np.diff(np.sort(new)) == 0).any():
            raise ValueError(f"observe: the replacement of {name} must be different experts from 0 to {number - 1}")
        experts = experts.copy()
        experts[changed] = new.astype(np.int64)
        return experts

    def _column(self, name: str, rows: Rows, x: Float32Array, see: _See | None = None) -> Float32Array:
        weight, bias = self._weight(f"model.{name}.weight"), self._bias(name)
        return (see or self._see)(name, rows, ops.linear(x, weight, self.contracts[name], bias))

    def _row(self, name: str, rows: Rows, x: Float32Array, see: _See | None = None) -> Float32Array:
        see = see or self._see
        ranks, contract, bias = self.tensor_parallel, self.contracts[name], self._bias(name)
        shards = zip(
            np.split(x, ranks, axis=1), np.split(self._weight(f"model.{name}.weight"), ranks, axis=1), strict=True
        )
        partials = [
            ops.row_linear_partial(mine, weight, contract, ranks, bias if rank == 0 else None)
            for rank, (mine, weight) in enumerate(shards)
        ]
        if ranks > 1:
            partials = np.split(see(f"{name}.partial", rows, np.concatenate(partials, axis=1)), ranks, axis=1)
        reduction = self.contracts[f"{name}.all_reduce"]
        return see(name, rows, ops.row_linear_merge(partials, contract, reduction, bias))

    def _head_norm(self, name: str, rows: Rows, x: Float32Array) -> Float32Array:
        y = ops.qk_norm(x, self._weight(f"model.{name}.weight"), self.config.rms_norm_eps, self.contracts[name])
        return self._see(name, rows, y.reshape(len(rows), -1)).reshape(x.shape)

    def _rope(self, name: str, rows: Rows, x: Float32Array) -> Float32Array:
        contract = self.contracts[name]
        table = ops.rope_table(rows.rope_position, self.config.rotary_dim, self.config.rope_base, contract)
        return self._see(name, rows, ops.rope(x, table, contract).reshape(len(rows), -1)).reshape(x.shape)

    def _write_cache(self, name: str, n: int, rows: Rows, k: Float32Array, v: Float32Array, state: PagedState) -> None:
        """Store keys and values, read them back as boundaries, and store what an observer made of them."""
        cache, slots = state.caches[n], state.slots(rows)
        contract = self.contracts[f"{name}.k_cache"]
        ops.write_cache(cache, slots, k, v, contract)
        for part, stored in (("k_cache", cache.keys), ("v_cache", cache.values)):
            page, offset = np.divmod(slots, cache.page_size)
            scale = cache.key_scale if part == "k_cache" else cache.value_scale
            logical = ops.from_cache(stored[page, offset], scale, contract).reshape(len(rows), -1)
            seen = self._see(f"{name}.{part}", rows, logical)
            if seen is not logical:
                stored[page, offset] = ops.to_cache(seen.reshape(k.shape), scale, contract)

    def _see(self, boundary: str, rows: Rows, values: Float32Array) -> Float32Array:
        """Show a boundary to the observer; its replacement, or ``values`` itself."""
        if self.observe is None:
            return values
        replacement = self.observe(boundary, rows.sample, rows.position, values)
        if replacement is None:
            return values
        if replacement.dtype != np.float32 or replacement.shape != values.shape:
            raise ValueError(
                f"observe: the replacement of {boundary} must be float32 {list(values.shape)}, "
                f"got {replacement.dtype} {list(replacement.shape)}"
            )
        return replacement

    def _weight(self, name: str) -> Float32Array:
        return self.weights[name]

    def _bias(self, name: str) -> Float32Array | None:
        part = name.rpartition(".")[2]
        has_bias = (
            self.config.qkv_bias if part in ("q_proj", "k_proj", "v_proj") else self.config.o_bias and part == "o_proj"
        )
        return self._weight(f"model.{name}.bias") if has_bias else None


@dataclass(frozen=True)
class ForwardResult:
    """Per sample, for its response tokens: float32 log-probabilities."""

    logprobs: list[Float32Array]


def forward(
    weights: Mapping[str, Float32Array],
    config: ModelConfig,
    batch: Sequence[Sequence[int]],
    profile: Profile,
    *,
    phase: Phase = "prefill",
    prompt_lengths: Sequence[int] | None = None,
    rope_positions: Sequence[Sequence[int]] | None = None,
    page_size: int = 16,
    block_tables: Sequence[NDArray[np.int64]] | None = None,
    chunk: int | None = None,
    sampling: Sampling = Sampling(),
    dtype: str = "bfloat16",
    tensor_parallel: int = 1,
    overrides: Overrides | None = None,
    observe: Observer | None = None,
) -> ForwardResult:
    """Score given sequences: the log-probability of every token after each prompt.

    ``prefill`` feeds whole sequences at once (or ``chunk`` tokens of each at a time); ``decode`` prefills prompts, then
    feeds one token of each unfinished sequence per step. The last token of a sequence is never fed: nothing follows.
    All forms have the same bits under a strict profile.

    Args:
        weights, config, profile, dtype, tensor_parallel, overrides, observe: see :class:`Qwen3`.
        batch: token ids of each sequence, at least 2.
        prompt_lengths: tokens of each sequence that are given; None is 1 each.
        rope_positions: position of each token for RoPE; None counts from 0.
        page_size: tokens per page of the KV cache.
        block_tables: pages of each sequence; None deals them out interleaved and out of order.

    Raises:
        ValueError: a token outside the vocabulary, a sequence too short or long, a prompt length out of range, a block
            table that is too short, shares pages or points outside the cache; and what :class:`Qwen3` raises.
    """
    model = Qwen3(weights, config, profile, dtype, tensor_parallel, overrides or {}, observe)
    prompts = list(prompt_lengths) if prompt_lengths is not None else [1] * len(batch)
    check_batch(batch, prompts, config)
    if phase not in ("prefill", "decode"):
        raise ValueError(f"phase: must be 'prefill' or 'decode', got {phase!r}")
    lengths = [len(tokens) - 1 for tokens in batch]
    state = PagedState.create(config, lengths, page_size, block_tables)
    logprobs = [np.empty(len(tokens) - prompt, np.float32) for tokens, prompt in zip(batch, prompts, strict=True)]
    for rows in schedule(batch, prompts, rope_positions, phase, chunk):
        hidden = model.hidden(rows, state)
        scored = np.flatnonzero(rows.position >= np.array(prompts)[rows.sample] - 1)
        if not scored.size:
            continue
        chosen = rows.take(scored)
        targets = np.array([batch[s][p + 1] for s, p in zip(chosen.sample, chosen.position, strict=True)], np.int64)
        scores = model.logprobs(model.logits(hidden[scored], chosen, sampling), targets, chosen)
        for s, p, score in zip(chosen.sample, chosen.position, scores, strict=True):
            logprobs[s][p + 1 - prompts[s]] = score
    return ForwardResult(logprobs)
