"""Faults of arithmetic and of sampling in real engines: the right verdict names a boundary."""

from __future__ import annotations

from dataclasses import replace

from diffcheck.faults.changes import Change
from diffcheck.faults.runs import (
    ALONE,
    BOTH,
    NATIVE,
    STALE_PREFIX,
    Lengths,
    RealFault,
    Run,
    Setup,
    contract_fault,
    in_both,
    known,
    refused,
)

_ATTENTION = "layers.0.self_attn.attention"
_Q_ROPE = "layers.0.self_attn.q_rope"
_Q_PROJ = "layers.0.self_attn.q_proj"
#: Many rows: the order of a sum of 97 terms shows in few logarithms.
_MANY: Lengths = ((70, 60), (11, 60), (9, 60))
_LONG: Lengths = ((300, 6), (40, 6), (9, 6))

NUMERICS = (
    contract_fault(
        "rope-bf16-table",
        "rope",
        "precision.table=bfloat16",
        _Q_ROPE,
        Run("vllm", _Q_ROPE, changes=(Change("vllm.rope_table", {"dtype": "bfloat16"}),), setup=NATIVE, spared=1),
        fields=("precision.table",),
        spared=1,
    ),
    contract_fault(
        "norm-bf16-variance",
        "rms_norm",
        "precision.variance=bfloat16",
        "layers.0.input_layernorm",
        fields=("precision.variance",),
    ),
    contract_fault(
        "norm-cast-elided",
        "rms_norm",
        "rounding.normalised=bfloat16",
        "layers.0.input_layernorm",
        fields=("rounding.normalised",),
    ),
    known(
        "norm-fused-residual",
        *in_both(Change("strict.unrounded_sum"), "layers.0.post_attention_layernorm", fields=("rounding.sum",)),
    ),
    contract_fault("silu-rounded", "swiglu", "rounding.silu=bfloat16", "layers.0.mlp.act", fields=("rounding.silu",)),
    contract_fault(
        "head-bf16",
        "lm_head",
        "rounding.output=bfloat16",
        "logits",
        Run("vllm", "logits", changes=(Change("vllm.narrow_logits", {"dtype": "bfloat16"}),), setup=NATIVE),
        fields=("rounding.output",),
    ),
    known(
        "logits-not-upcast",
        *in_both(
            Change("strict.contract", {"operator": "logsumexp", "fields": {"rounding.logits": "bfloat16"}}),
            "logsumexp",
        ),
        Run(
            "megatron",
            "logprobs",
            changes=(Change("megatron.narrow_loss", {"dtype": "bfloat16"}),),
            setup=NATIVE,
        ),
    ),
    known(
        "log-of-softmax",
        *in_both(
            Change("strict.contract", {"operator": "logprob", "fields": {"order.formula": "log(softmax(x))"}}),
            "logprobs",
        ),
        Run("vllm", "logprobs", changes=(Change("vllm.log_of_softmax"),), setup=NATIVE),
    ),
    known(
        "attention-splits",
        *in_both(
            Change(
                "strict.contract",
                {"operator": "attention", "fields": {"partition.block": 16, "partition.split": "equal-4"}},
            ),
            _ATTENTION,
            healthy=(Change("strict.contract", {"operator": "attention", "fields": {"partition.block": 16}}),),
        ),
        Run(
            "vllm",
            _ATTENTION,
            changes=(Change("vllm.environment", {"VLLM_CPU_ATTN_SPLIT_KV": True}),),
            healthy=(Change("vllm.environment", {"VLLM_CPU_ATTN_SPLIT_KV": False}),),
            setup=NATIVE,
            lengths=_LONG,
            spared=300,
        ),
    ),
    known(
        "rescale-contracted",
        *in_both(
            Change(
                "strict.contract",
                {"operator": "attention", "fields": {"partition.block": 16, "order.accumulate": "fma"}},
            ),
            _ATTENTION,
            "float32",
            healthy=(
                Change(
                    "strict.contract",
                    {"operator": "attention", "fields": {"partition.block": 16, "order.accumulate": "add"}},
                ),
            ),
        ),
    ),
    known(
        "ring-all-reduce",
        Run(
            "megatron",
            "layers.0.self_attn.o_proj",
            changes=(Change("strict.contract", {"operator": "all_reduce", "fields": {"order.merge": "ring"}}),),
            setup=Setup(dtype="float32", alone=True, tensor_parallel=4),
            fields=("order.merge",),
        ),
    ),
    known(
        "rope-inv-freq",
        *in_both(Change("strict.frequency", {"index": 1}), _Q_ROPE, "float32", spared=1),
        *(Run(e, _Q_ROPE, changes=(Change(f"{e}.rope_table", {"index": 1}),), setup=NATIVE, spared=1) for e in BOTH),
    ),
    known(
        "attention-scale",
        *in_both(Change("strict.attention", {"scale": 1.6}), _ATTENTION, spared=1),
        Run("vllm", _ATTENTION, changes=(Change("vllm.attention", {"scale": ["times", 1.6]}),), setup=NATIVE, spared=1),
        Run("megatron", _ATTENTION, changes=(Change("megatron.attention", {"scale": 1.6}),), setup=NATIVE, spared=1),
    ),
    known(
        "attention-sinks",
        *in_both(Change("strict.attention", {"sink": 0.5}), _ATTENTION),
        Run("vllm", _ATTENTION, changes=(Change("vllm.attention", {"sinks": 0.5}),), setup=NATIVE),
        Run("megatron", _ATTENTION, changes=(Change("megatron.attention", {"sink": 0.5}),), setup=NATIVE),
    ),
    known(
        "gemm-by-batch-size",
        *in_both(Change("strict.small_batches", {"rows": 15, "fields": {"order.k": "descending"}}), _Q_PROJ, "float32"),
    ),
    known(
        "split-k-by-batch-size",
        *in_both(Change("strict.small_batches", {"rows": 15, "fields": {"partition.segments": 4}}), _Q_PROJ, "float32"),
    ),
    known(
        "head-adapter-dropped",
        Run(
            "vllm",
            "logits",
            changes=(Change("vllm.head_adapter", {"prompts": False}),),
            healthy=(Change("vllm.head_adapter"),),
            setup=ALONE,
            right_plan={"phase": "prefill"},
        ),
    ),
    known(
        "cause-unknown",
        *(Run(e, "layers.0.mlp.act", overrides=("layers.0.mlp.act: flip=0,30,5",), unexplained=True) for e in BOTH),
    ),
    known(
        "nondeterministic-loss",
        *in_both(Change("strict.nondeterministic"), "logsumexp", verdict="inconclusive", unsteady=True, lengths=_MANY),
    ),
    RealFault(
        "padded-vocabulary",
        "unmasked padding columns of the head",
        "columns past the real vocabulary take part in the softmax",
        (
            *(Run(e, "logsumexp", changes=(Change(f"{e}.padded_vocabulary"),)) for e in BOTH),
            Run("megatron", "logprobs", changes=(Change("megatron.padded_vocabulary"),), setup=NATIVE),
            Run("vllm", "logprobs", changes=(Change("vllm.padded_vocabulary"),), setup=NATIVE),
        ),
    ),
    RealFault(
        "cache-poisoned",
        "seen here after fused-update-torn",
        "slots of the KV cache that no request uses hold NaN, and attention multiplies them by zero",
        (Run("vllm", _ATTENTION, changes=(Change("vllm.poisoned_cache"),), setup=NATIVE),),
    ),
    known(
        "kv-scale-applied-twice",
        Run("vllm", "layers.0.self_attn.v_cache", changes=(Change("vllm.scaled_values", {"factor": 2.0}),)),
    ),
)

SAMPLING = (
    known(
        "raw-logprobs",
        Run(
            "vllm",
            "processed_logits",
            changes=(Change("vllm.logprobs_mode", {"mode": "raw_logprobs"}),),
            plan={"temperature": 0.7},
        ),
        Run(
            "megatron",
            "processed_logits",
            changes=(Change("strict.shaping", {"temperature": 1.0}),),
            plan={"temperature": 0.7},
        ),
    ),
    known(
        "top-p-renormalised",
        *in_both(Change("strict.renormalised", {"top_p": 0.9}), "logsumexp"),
        Run(
            "vllm",
            "processed_logits",
            changes=(Change("vllm.logprobs_mode", {"mode": "processed_logprobs"}),),
            healthy=(Change("vllm.logprobs_mode", {"mode": "raw_logprobs"}),),
            plan={"top_p": 0.9},
            setup=NATIVE,
        ),
    ),
    RealFault(
        "top-p-ignored",
        "trl 6789",
        "the trainer scores without the top-p mask that it reports",
        (
            Run(
                "megatron",
                "processed_logits",
                changes=(Change("strict.shaping", {"top_p": None}),),
                plan={"top_p": 0.9},
            ),
        ),
    ),
    known("temperature-differs", *(refused(e, "temperature", overrides=("object: temperature=0.7",)) for e in BOTH)),
    RealFault(
        "top-p-differs",
        "trl 6789",
        "one side reports another top-p than the other",
        tuple(refused(e, "top_p", overrides=("object: top_p=0.9",)) for e in BOTH),
    ),
)

DOUBLE = (
    known(
        "rope-bf16-and-fused-norm",
        *in_both(
            Change("strict.contract", {"operator": "rope", "fields": {"precision.table": "bfloat16"}}),
            _Q_ROPE,
            then=(Change("strict.unrounded_sum"),),
            then_where="layers.0.post_attention_layernorm",
        ),
    ),
    known(
        "stale-prefix-and-kv-scale",
        replace(
            STALE_PREFIX,
            then=(Change("vllm.scaled_values", {"factor": 2.0}),),
            then_where="layers.0.self_attn.v_cache",
        ),
    ),
)
