"""Which contract holds at which boundary of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from reference.contract.base import Contract, Value, fields
from reference.contract.names import offered
from reference.contract.profiles import Profile
from reference.models.config import ModelConfig

#: Boundary pattern (``layers.*.mlp.act``) to contract fields (``rounding.silu``) that differ there.
Overrides = Mapping[str, Mapping[str, Value]]


def operator_sites(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(boundary, operator) of every place where a contract is looked up, in dataflow order.

    The keys' contract also holds for the values in the cache, that of the scores for the choice of experts and for
    their weights. The all-reduce behind a row-parallel projection is the
    site ``<projection>.all_reduce``.
    """
    yield "embed_tokens", "embedding"
    for n in range(config.num_hidden_layers):
        layer = f"layers.{n}"
        yield f"{layer}.input_layernorm", "rms_norm"
        for part in "qkv":
            yield f"{layer}.self_attn.{part}_proj", "linear"
        for part in "qk":
            if config.qk_norm:
                yield f"{layer}.self_attn.{part}_norm", "qk_norm"
            yield f"{layer}.self_attn.{part}_rope", "rope"
        yield f"{layer}.self_attn.k_cache", "kv_cache"
        yield f"{layer}.self_attn.attention", "attention"
        yield from _row_sites(f"{layer}.self_attn.o_proj")
        yield f"{layer}.attn_residual", "residual_add"
        yield f"{layer}.post_attention_layernorm", "rms_norm"
        if config.is_sparse(n):
            yield f"{layer}.mlp.gate", "linear"
            yield f"{layer}.mlp.scores", "moe_router"
            for e in range(config.num_experts):
                yield from _mlp_sites(f"{layer}.mlp.experts.{e}")
            yield f"{layer}.mlp.combine", "moe_combine"
        else:
            yield from _mlp_sites(f"{layer}.mlp")
        yield f"{layer}.mlp_residual", "residual_add"
    yield "norm", "rms_norm"
    yield "logits", "lm_head"
    yield "processed_logits", "processed_logits"
    yield "logsumexp", "logsumexp"
    yield "logprobs", "logprob"


def _mlp_sites(name: str) -> Iterator[tuple[str, str]]:
    yield f"{name}.gate_proj", "linear"
    yield f"{name}.up_proj", "linear"
    yield f"{name}.act", "swiglu"
    yield from _row_sites(f"{name}.down_proj")


def _row_sites(name: str) -> Iterator[tuple[str, str]]:
    yield name, "row_linear"
    yield f"{name}.all_reduce", "all_reduce"


def resolve_contracts(config: ModelConfig, profile: Profile, dtype: str, overrides: Overrides) -> dict[str, Contract]:
    """Boundary -> contract: the profile's for ``dtype``, changed by every override whose pattern matches.

    Raises:
        ValueError: a pattern that matches no boundary, a field the operator there lacks, or a value it cannot take.
    """
    sites = dict(operator_sites(config))
    base = {operator: profile.contract(operator, dtype) for operator in set(sites.values())}
    if "moe_router" in base:
        # A fact of the model, whatever the profile.
        base["moe_router"] = base["moe_router"].override("order.renormalise", config.norm_topk_prob)
    resolved = {boundary: base[operator] for boundary, operator in sites.items()}
    for pattern, changes in overrides.items():
        matching = [boundary for boundary in sites if fnmatchcase(boundary, pattern)]
        if not matching:
            raise ValueError(f"override {pattern!r}: no boundary of the model matches it; {offered(pattern, sites)}")
        for boundary in matching:
            for path in changes:
                if path not in fields(type(resolved[boundary])):
                    known = offered(path, fields(type(resolved[boundary])))
                    raise ValueError(
                        f"override {pattern!r}: {sites[boundary]} at {boundary} has no field {path!r}; {known}"
                    )
            try:
                resolved[boundary] = resolved[boundary].replace(changes)
            except ValueError as error:
                raise ValueError(f"override {pattern!r}: {error}") from None
    return resolved
