"""Profiles: one contract per operator under a name. ``strict-v1`` is ours; the others describe engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reference.contract.base import CONTRACTS, Contract, Value
from reference.contract.names import offered


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
    #: Dtype -> operator -> fields that differ once more for a model held in that dtype.
    dtype_changes: Mapping[str, Mapping[str, Mapping[str, Value]]] = field(default_factory=dict)
    #: Operator -> why its contract here is only the nearest known one. Empty for a profile that is a specification.
    unmodelled: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_strict(self) -> bool:
        """Whether it is a specification that engines can follow; any other describes what an engine does."""
        return self.name.startswith("strict-")

    def contract(self, operator: str, dtype: str = "bfloat16") -> Contract:
        """The contract of ``operator`` (or an alias of it) for a model held in ``dtype``.

        Raises:
            ValueError: unknown operator or dtype.
        """
        name = operator_name(operator)
        contract = CONTRACTS[name]().replace(self.changes.get(name, {})).with_dtype(dtype)
        return contract.replace(self.dtype_changes.get(dtype, {}).get(name, {}))

    def contracts(self, dtype: str = "bfloat16") -> dict[str, Contract]:
        """Every operator's contract."""
        return {name: self.contract(name, dtype) for name in sorted(CONTRACTS)}


MATRIX_OPERATORS = ("linear", "row_linear", "lm_head", "attention")


def _strict(unit: str, evidence: str) -> Profile:
    changes = {operator: {"primitives.unit": unit} for operator in MATRIX_OPERATORS}
    return Profile(f"strict-v1/{unit}", unit, evidence, changes)


# What engines compute on a CPU. PyTorch's pieces recur: its sums are cascades of 8 lanes, its softmax sums 16 lanes
# merged by halving, and every operation of an eager bfloat16 graph rounds its result.
_TORCH_NORM: dict[str, Value] = {
    "order.sum": "cascade-8x4",
    "primitives.square": "mul_add",
    "primitives.rsqrt": "uncompensated",
}
_CAST_BEFORE_WEIGHT: dict[str, Value] = {"rounding.normalised": "bfloat16"}
_TORCH_ROPE: dict[str, Value] = {
    "precision.table": "bfloat16",
    "rounding.product": "bfloat16",
    "primitives.table": "float32-pow",
    "primitives.rotate": "mul_add",
}
#: SLEEF's exponential, and a logarithm from the C library that is almost always correctly rounded.
_LIBM: dict[str, Value] = {"primitives.exp": "sleef-u10", "primitives.log": "correctly-rounded"}
#: MKL's vector functions, which PyTorch calls on whole tensors: no sequence of ours has their last bit everywhere.
_MKL: dict[str, Value] = {"primitives.exp": "correctly-rounded", "primitives.log": "correctly-rounded"}
_LOG_SOFTMAX: dict[str, Mapping[str, Value]] = {
    "logsumexp": {"partition.segments": 1, "order.sum": "lanes-16-or-chain", **_LIBM},
    "logprob": {"order.formula": "(x - max) - log(sum)", "primitives.log": "correctly-rounded"},
}
_EAGER_ATTENTION: dict[str, Value] = {
    "partition.block": 0,
    "order.k": "pairs_odd_first",
    "order.row_sum": "lanes-16-or-chain",
    "order.normalise": "before_values",
    "rounding.scores": "bfloat16",
    "primitives.exp": "exp-sleef-u10",
    "primitives.finish": "reciprocal",
}
_BFLOAT16_COLLECTIVE: dict[str, Value] = {
    "order.merge": "chain",
    "rounding.transport": "bfloat16",
    "rounding.hop": "bfloat16",
}
#: Matrix products on a CPU with AVX-512 BF16: FMAs in pairs, and a new chain for every block of K.
_BF16_GEMM: dict[str, Value] = {"order.k": "pairs_odd_first", "partition.block_k": 512}
_TORCH_COMMON: dict[str, Mapping[str, Value]] = {
    "linear": _BF16_GEMM,
    "row_linear": {**_BF16_GEMM, "partition.segments": 1},
    "lm_head": {**_BF16_GEMM, "rounding.output": "bfloat16"},
    "swiglu": {"rounding.silu": "bfloat16", "primitives.silu": "sleef-u10"},
    "all_reduce": _BFLOAT16_COLLECTIVE,
    "reduce_scatter": _BFLOAT16_COLLECTIVE,
}


def _float32_gemm(block_k: int, **others: Mapping[str, Value]) -> dict[str, Mapping[str, Mapping[str, Value]]]:
    """What changes for float32 models: an ascending chain, in blocks of another length."""
    gemm: dict[str, Value] = {"order.k": "ascending", "partition.block_k": block_k}
    return {"float32": {"linear": gemm, "row_linear": gemm, "lm_head": gemm, **others}}


_GEMM = (
    "exact on x86 with AVX-512 BF16 up to K = 512; beyond, the library picks blocks of 512 or 1024 (192 in MKL's "
    "float32) by shape, and products of a single row or of odd shapes have other orders; with AMX the order is another "
    "(unit amx-bf16, modelled), and a fit on a few hundred rows does not settle it"
)
_UNMODELLED_GEMM: dict[str, str] = {"linear": _GEMM, "row_linear": _GEMM, "lm_head": _GEMM}

_VLLM_CPU = Profile(
    name="vllm-0.32-cpu",
    arithmetic="fma32-seq",
    evidence="read from vLLM 0.32.0 and completed by search; a bfloat16 forward is equal in bits (docs/contracts.md)",
    changes={
        **_TORCH_COMMON,
        **_LOG_SOFTMAX,
        "rms_norm": {**_TORCH_NORM, **_CAST_BEFORE_WEIGHT, "rounding.sum": "float32"},
        "qk_norm": {**_TORCH_NORM, **_CAST_BEFORE_WEIGHT},
        "rope": {**_TORCH_ROPE, "rounding.product": "float32"},
        "attention": {
            "partition.block": 0,
            "order.row_sum": "lanes-halving-16",
            "rounding.probabilities": "float32",
            "primitives.exp": "exp-fast-u20",
            "primitives.scale": "query",
            "primitives.finish": "reciprocal",
        },
        "processed_logits": {
            "order.sum": "lanes-16-or-chain",
            "precision.cumulated": "float64",
            "primitives.exp": "sleef-u10",
            "primitives.normalise": "reciprocal",
        },
    },
    dtype_changes=_float32_gemm(512, rope={"primitives.rotate": "fma_sin"}),
    unmodelled={
        **_UNMODELLED_GEMM,
        "attention": "exact up to 400 keys (measured); its tiles, sized by the cache, may show in longer sequences",
        "rope": "exact but for the float32 table, whose cosines and sines are SLEEF's, up to 1 ulp away",
        "logprob": "the C library's logarithm is correctly rounded in all but about 1 of 100,000 cases",
    },
)
_MEGATRON_LOCAL = Profile(
    name="megatron-0.16-local",
    arithmetic="fma32-seq",
    evidence="read from Megatron-core 0.16.1, local spec; a bfloat16 forward is equal in bits up to the logits",
    changes={
        **_TORCH_COMMON,
        "rms_norm": _TORCH_NORM,
        "qk_norm": _TORCH_NORM,
        "rope": _TORCH_ROPE,
        "attention": _EAGER_ATTENTION,
        "linear": {**_BF16_GEMM, "order.bias": "after_rounding"},
        "row_linear": {**_BF16_GEMM, "partition.segments": 1, "order.bias": "after_rounding"},
        "logsumexp": {"partition.segments": 1, "order.sum": "cascade-8x4", **_MKL},
        "logprob": _LOG_SOFTMAX["logprob"],
    },
    dtype_changes=_float32_gemm(192, attention={"order.k": "ascending"}),
    unmodelled={
        **_UNMODELLED_GEMM,
        "attention": "exact in bfloat16 on x86 with AVX-512 BF16; float32 products of some shapes have other orders",
        "logsumexp": "the order is exact; MKL's exponential is correctly rounded in about 99 of 100 cases",
        "logprob": "MKL's logarithm is correctly rounded in about 98 of 100 cases",
    },
)
_TRANSFORMERS_EAGER = Profile(
    name="transformers-5-eager",
    arithmetic="fma32-seq",
    evidence="read from transformers 5.19 (Qwen3, eager attention); a bfloat16 forward is equal in bits",
    changes={
        **_TORCH_COMMON,
        **_LOG_SOFTMAX,
        "rms_norm": {**_TORCH_NORM, **_CAST_BEFORE_WEIGHT},
        "qk_norm": {**_TORCH_NORM, **_CAST_BEFORE_WEIGHT},
        "rope": _TORCH_ROPE,
        "attention": {**_EAGER_ATTENTION, "rounding.products": "bfloat16"},
    },
    dtype_changes=_float32_gemm(192, attention={"order.k": "ascending"}),
    unmodelled={
        **_UNMODELLED_GEMM,
        "attention": _MEGATRON_LOCAL.unmodelled["attention"],
        "logprob": _VLLM_CPU.unmodelled["logprob"],
    },
)

_ALL = (
    _strict("fma32-seq", "a specification: IEEE 754 operations in a fixed order, on any hardware"),
    _strict("mfma-cdna3-g8", "a specification for gfx942: its matrix unit is modelled, the rest is IEEE 754"),
    _strict("hopper-k16", "a specification for sm_90: its matrix unit is modelled, and was measured on one H200"),
    _VLLM_CPU,
    _MEGATRON_LOCAL,
    _TRANSFORMERS_EAGER,
)
PROFILES: dict[str, Profile] = {p.name: p for p in _ALL}

#: Other names of profiles.
PROFILE_ALIASES = {
    "strict-v1": "strict-v1/fma32-seq",
    "vllm": "vllm-0.32-cpu",
    "megatron": "megatron-0.16-local",
    "transformers": "transformers-5-eager",
}

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
        raise ValueError(f"unknown profile {name!r}; {offered(name, PROFILES)}")
    return PROFILES[known]


def operator_name(name: str) -> str:
    """The operator that ``name`` means: itself, an alias, or the boundary ``layers.3.mlp.act``.

    Raises:
        ValueError: no such operator; the known ones are named.
    """
    short = name.strip().lower().replace("-", "_").removesuffix(".partial").rpartition(".")[2]
    known = OPERATOR_ALIASES.get(short, short)
    if known not in CONTRACTS:
        raise ValueError(f"unknown operator {name!r}; {offered(short, sorted(CONTRACTS))}")
    return known
