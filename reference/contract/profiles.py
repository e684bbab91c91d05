"""Profiles: one contract per operator under a name. ``strict-v1`` is ours; the others describe engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reference import operators as _operators  # noqa: F401 - importing it registers every contract
from reference.contract.base import CONTRACTS, Contract, Value


@dataclass(frozen=True)
class Profile:
    """One contract per operator, for a bfloat16 model; :meth:`contract` gives the form for another dtype."""

    name: str
    #: Matrix unit of the linear layers and attention: a name in ``reference.dot.UNITS``.
    arithmetic: str
    #: What it describes and how that is known.
    evidence: str
    #: Operator -> fields that differ from ``strict-v1/fma32-seq``.
    changes: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    #: Operator -> why its contract here is only the nearest known one. Empty for a profile that is a specification.
    unmodelled: Mapping[str, str] = field(default_factory=dict)

    def contract(self, operator: str, dtype: str = "bfloat16") -> Contract:
        """The contract of ``operator`` (or an alias of it) for a model held in ``dtype``.

        Raises:
            ValueError: unknown operator or dtype.
        """
        name = operator_name(operator)
        return CONTRACTS[name]().replace(self.changes.get(name, {})).with_dtype(dtype)

    def contracts(self, dtype: str = "bfloat16") -> dict[str, Contract]:
        """Every operator's contract."""
        return {name: self.contract(name, dtype) for name in sorted(CONTRACTS)}


MATRIX_OPERATORS = ("linear", "row_linear", "lm_head", "attention")


def _strict(unit: str, evidence: str) -> Profile:
    changes = {operator: {"primitives.unit": unit} for operator in MATRIX_OPERATORS}
    return Profile(f"strict-v1/{unit}", unit, evidence, changes)


#: One row per token through torch's CPU mean: vectors of 16 float32, four registers in flight, for rows of this size.
_TORCH_NORM: dict[str, Value] = {
    "order.sum": "vector-16x4",
    "rounding.normalised": "bfloat16",
    "primitives.square": "mul_add",
    "primitives.rsqrt": "uncompensated",
}
_TORCH_ROPE: dict[str, Value] = {
    "precision.table": "bfloat16",
    "rounding.product": "bfloat16",
    "primitives.table": "float32-pow",
    "primitives.rotate": "mul_add",
}
_TORCH_LOGITS: dict[str, Mapping[str, Value]] = {
    "lm_head": {"rounding.output": "bfloat16"},
    "logsumexp": {"partition.segments": 1, "order.sum": "vector-16x1"},
}
_ONEDNN = "oneDNN or MKL chooses the order of K by shape and thread count; the chain is the nearest contract"
_TORCH_EXP = "the exponential is SLEEF's or a vendor's, of at most 1 ulp; rlk is the nearest"


_ALL = (
    _strict("fma32-seq", "a specification: IEEE 754 operations in a fixed order, on any hardware"),
    _strict("mfma-cdna3-g8", "a specification for gfx942: its matrix unit is modelled, the rest is IEEE 754"),
    _strict("hopper-k16", "a specification for sm_90: its matrix unit is modelled, and was measured on one H200"),
)
PROFILES: dict[str, Profile] = {p.name: p for p in _ALL}

#: Other names of profiles.
PROFILE_ALIASES = {"strict-v1": "strict-v1/fma32-seq"}

#: Other names of operators: class names of engines, last parts of boundary names, the field's short forms.
OPERATOR_ALIASES = {
    "embed_tokens": "embedding",
    "rmsnorm": "rms_norm",
    "norm": "rms_norm",
    "layernorm": "rms_norm",
    "input_layernorm": "rms_norm",
    "post_attention_layernorm": "rms_norm",
    "column_linear": "linear",
    "q_proj": "linear",
    "k_proj": "linear",
    "v_proj": "linear",
    "gate_proj": "linear",
    "up_proj": "linear",
    "o_proj": "row_linear",
    "down_proj": "row_linear",
    "q_norm": "qk_norm",
    "k_norm": "qk_norm",
    "q_rope": "rope",
    "k_rope": "rope",
    "rotary_embedding": "rope",
    "k_cache": "kv_cache",
    "v_cache": "kv_cache",
    "sdpa": "attention",
    "attn_residual": "residual_add",
    "mlp_residual": "residual_add",
    "act": "swiglu",
    "silu_and_mul": "swiglu",
    "logits": "lm_head",
    "lse": "logsumexp",
    "log_sum_exp": "logsumexp",
    "logprobs": "logprob",
}


def names() -> list[str]:
    """Names of all profiles."""
    return list(PROFILES)


def profile(name: str) -> Profile:
    """The profile called ``name``; ``strict-v1`` alone is ``strict-v1/fma32-seq``.

    Raises:
        ValueError: no such profile; the known ones are named.
    """
    known = PROFILE_ALIASES.get(name, name)
    if known not in PROFILES:
        raise ValueError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}")
    return PROFILES[known]


def operator_name(name: str) -> str:
    """The operator that ``name`` means: itself, an alias, or the boundary ``layers.3.mlp.act``.

    Raises:
        ValueError: no such operator; the known ones are named.
    """
    short = name.strip().lower().replace("-", "_").removesuffix(".partial").rpartition(".")[2]
    known = OPERATOR_ALIASES.get(short, short)
    if known not in CONTRACTS:
        raise ValueError(f"unknown operator {name!r}; known: {', '.join(sorted(CONTRACTS))}")
    return known
