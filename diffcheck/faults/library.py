"""Every fault as data: who reported it, what causes it, how it is injected, what must be found.

Contract faults and object faults are injected through the text of ``--override``, so anyone can repeat them with
``localize``. The others recompute one operator of the live forward on its live inputs (`injections`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from diffcheck.capture.interventions import Intervention
from diffcheck.faults import injections as inject

Expected = Literal["diverged", "not_comparable", "equal", "inconclusive"]


@dataclass(frozen=True)
class Fault:
    """One row of the library. The right side is the faulty one unless an override says ``rollout/``."""

    name: str
    #: Public reports: project and number of the thread.
    reports: str
    cause: str
    #: Boundary that must be named first, or the object's field that must be named (its beginning).
    where: str
    verdict: Expected = "diverged"
    #: As on the command line.
    overrides: tuple[str, ...] = ()
    #: Interventions on the right side, made for a laboratory (`Laboratory`).
    interventions: Callable[[Any], tuple[Intervention, ...]] | None = None
    #: Contract fields that inference must name as the difference.
    fields: tuple[str, ...] = ()
    #: Whether the cause lies outside the space, so that inference must name no field and say so.
    unexplained: bool = False
    dtype: str = "bfloat16"
    phase: str = "decode"
    tensor_parallel: int = 1
    #: Whether position 0 must stay equal at ``where``.
    spares_first_position: bool = False
    #: Engine options of the right side alone: page size, prefill chunk, phase, ranks.
    right: dict[str, Any] = field(default_factory=dict)
    #: Another fault on the same side, which must be found once this one is taken away.
    then: str = ""
    #: Overrides of a second run of the right side, which must disagree with its first: the side is not deterministic.
    rerun: tuple[str, ...] = ()


_ATTENTION = "layers.0.self_attn.attention"
_SMALL_BLOCKS = tuple(f"{side}/layers.*.self_attn.attention: partition.block=16" for side in ("rollout", "train"))

_CONTRACT = (
    Fault(
        "rope-bf16-table",
        "torchtitan parity note",
        "the RoPE table is cast to bfloat16 on one side",
        "layers.0.self_attn.q_rope",
        overrides=("layers.*.self_attn.?_rope: precision.table=bfloat16",),
        fields=("precision.table",),
        spares_first_position=True,
    ),
    Fault(
        "norm-bf16-variance",
        "vllm 36101",
        "RMSNorm's variance is held in bfloat16",
        "layers.0.input_layernorm",
        overrides=("layers.*.input_layernorm: precision.variance=bfloat16",),
        fields=("precision.variance",),
    ),
    Fault(
        "norm-cast-elided",
        "pytorch 158699, NeMo-RL 1014",
        "the compiler elides the cast before the norm's weight multiply",
        "layers.0.input_layernorm",
        overrides=("rollout/layers.*.input_layernorm: rounding.normalised=bfloat16",),
        fields=("rounding.normalised",),
    ),
    Fault(
        "norm-fused-residual",
        "vLLM's fused add and norm against any unfused one",
        "the norm takes the unrounded sum on one side and the rounded residual on the other",
        "layers.0.post_attention_layernorm",
        overrides=("layers.*.post_attention_layernorm: rounding.sum=float32",),
        fields=("rounding.sum",),
    ),
    Fault(
        "silu-rounded",
        "vllm-omni 6283, mojo_opset 461",
        "SiLU is rounded to bfloat16 before it is multiplied",
        "layers.0.mlp.act",
        overrides=("layers.*.mlp.act: rounding.silu=bfloat16",),
        fields=("rounding.silu",),
    ),
    Fault(
        "head-bf16",
        "open-instruct 1387, vllm 48390",
        "the head's logits are rounded to bfloat16 on one side",
        "logits",
        overrides=("logits: rounding.output=bfloat16",),
        fields=("rounding.output",),
    ),
    Fault(
        "logits-not-upcast",
        "OpenRLHF 634",
        "the loss takes logits in bfloat16",
        "logsumexp",
        overrides=("logsumexp: rounding.logits=bfloat16",),
    ),
    Fault(
        "log-of-softmax",
        "torchtitan 3629",
        "log(softmax(x)) is written out instead of x - lse",
        "logprobs",
        overrides=("logprobs: order.formula=log(softmax(x))",),
    ),
    Fault(
        "attention-splits",
        "FlashAttention 2604",
        "prefill takes the keys in one pass, decode in four splits",
        _ATTENTION,
        overrides=(*_SMALL_BLOCKS, "layers.*.self_attn.attention: partition.split=equal-4"),
    ),
    Fault(
        "rescale-contracted",
        "RL-Kernel 394",
        "the compiler contracts the rescaling of the online softmax into an FMA",
        _ATTENTION,
        overrides=(
            *_SMALL_BLOCKS,
            "rollout/layers.*.self_attn.attention: order.accumulate=add",
            "layers.*.self_attn.attention: order.accumulate=fma",
        ),
        dtype="float32",
    ),
    Fault(
        "ring-all-reduce",
        "NeMo TP guide, RL-Kernel 102",
        "row-parallel partial sums merge round a ring on one side, up a tree on the other (4 ranks)",
        "layers.0.self_attn.o_proj",
        overrides=("layers.*.self_attn.o_proj.all_reduce: order.merge=ring",),
        fields=("order.merge",),
        tensor_parallel=4,
        dtype="float32",
    ),
)

_OPERATOR = (
    Fault(
        "raw-logprobs",
        "vime 64, vime 69",
        "one side divides by the temperature, the other returns raw logprobs though it reports the same temperature",
        "processed_logits",
        overrides=("rollout/object: temperature=0.7", "train/object: temperature=0.7"),
        interventions=inject.raw_logits,
    ),
    Fault(
        "top-p-renormalised",
        "trl 6789",
        "logprobs are renormalised over the top-p set",
        "logsumexp",
        interventions=inject.renormalised,
    ),
    Fault(
        "rope-inv-freq",
        "transformers 28685",
        "the inverse frequencies were made on another device: one of them is 1 ulp off",
        "layers.0.self_attn.q_rope",
        interventions=inject.shifted_frequency,
        dtype="float32",
        spares_first_position=True,
    ),
    Fault(
        "attention-scale",
        "Megatron-LM 1429, mobius 548",
        "the attention scale lacks mscale: scores are 1.6 times as large",
        _ATTENTION,
        interventions=inject.scaled_attention,
        spares_first_position=True,
    ),
    Fault(
        "attention-sinks",
        "miles 1500",
        "one side drops the attention sinks",
        _ATTENTION,
        interventions=inject.sinks,
    ),
    Fault(
        "gemm-by-batch-size",
        "vllm 33123, vllm 34046",
        "batches below 8 rows take another kernel, which goes through K in another order",
        "layers.0.self_attn.q_proj",
        interventions=inject.other_order_when_small,
        dtype="float32",
        spares_first_position=True,
    ),
    Fault(
        "split-k-by-batch-size",
        "verl 6280",
        "batches below 8 rows are cut along K",
        "layers.0.self_attn.q_proj",
        interventions=inject.split_k_when_small,
        dtype="float32",
        spares_first_position=True,
    ),
    Fault(
        "stale-prefix-cache",
        "prime-rl 1650, SkyRL 2246, NeMo-RL 4018",
        "the prefix cache survives the weight update: the prefix's keys and values are those of the last step",
        "layers.0.self_attn.k_cache",
        interventions=inject.stale_prefix,
    ),
    Fault(
        "kv-scale-applied-twice",
        "KV scales of quantised caches",
        "V is stored with a scale that was applied already",
        "layers.0.self_attn.v_cache",
        interventions=inject.scaled_values,
    ),
    Fault(
        "head-adapter-dropped",
        "vllm 51594",
        "prompt logprobs are computed without the head's adapter",
        "logits",
        interventions=inject.without_adapter,
    ),
    Fault(
        "cause-unknown",
        "open-instruct 1473",
        "a difference that no contract makes: one bit of one element",
        "layers.0.mlp.act",
        overrides=("layers.0.mlp.act: flip=0,30,5",),
        unexplained=True,
    ),
    Fault(
        "nondeterministic-loss",
        "verl determinism note",
        "the cross entropy adds in another order at every run",
        "logsumexp",
        verdict="inconclusive",
        overrides=("logsumexp: order.sum=chain",),
        rerun=("logsumexp: order.sum=lanes-halving-8",),
    ),
)

_OBJECT = (
    Fault(
        "temperature-differs",
        "vime 64",
        "the trainer scores at another temperature than the rollout drew at",
        "temperature",
        verdict="not_comparable",
        overrides=("object: temperature=0.7",),
    ),
    Fault(
        "positions-count-padding",
        "unsloth-zoo 840",
        "left padding shifts positions",
        "positions",
        verdict="not_comparable",
        overrides=("object: position_offset=3",),
    ),
    Fault(
        "logprobs-shifted",
        "ms-swift 8196, prime-rl 1525",
        "every token is given the logprob of the token before it",
        "alignment",
        verdict="not_comparable",
        interventions=inject.late_logprobs,
    ),
    Fault(
        "tokens-re-encoded",
        "rllm 816, rllm 272",
        "decoding and encoding again changed the ids",
        "token_ids",
        verdict="not_comparable",
        overrides=("object: swap_tokens=1,2,5",),
    ),
    Fault(
        "old-weights",
        "trl 5312",
        "sleep mode put the weights of the last step back",
        "weights.model.layers.0.mlp.up_proj.weight",
        verdict="not_comparable",
        overrides=("weights.model.layers.0.mlp.up_proj.weight: flip=17,3",),
    ),
    Fault(
        "stale-head",
        "torchtitan 2402, prime-rl 2438",
        "the head was not updated, the embedding was",
        "weights.lm_head.weight",
        verdict="not_comparable",
        overrides=("weights.lm_head.weight: flip=5",),
    ),
    Fault(
        "lora-merged-in-bf16",
        "NeMo-RL 3696",
        "one projection's adapter was merged in bfloat16",
        "weights.model.layers.0.self_attn.q_proj.weight",
        verdict="not_comparable",
        overrides=("weights.model.layers.0.self_attn.q_proj.weight: flip=33",),
    ),
)

_DOUBLE = (
    Fault(
        "rope-bf16-and-fused-norm",
        "torchtitan parity note; vLLM's fused add and norm",
        "two faults at once: the RoPE table in bfloat16, and the norm of the unrounded sum",
        "layers.0.self_attn.q_rope",
        overrides=("layers.*.self_attn.?_rope: precision.table=bfloat16",),
        fields=("precision.table",),
        then="norm-fused-residual",
    ),
    Fault(
        "stale-prefix-and-kv-scale",
        "prime-rl 1650, SkyRL 2246, NeMo-RL 4018; KV scales",
        "two faults at once: a prefix cache of old weights, and V stored with a scale twice",
        "layers.0.self_attn.k_cache",
        interventions=inject.stale_prefix,
        then="kv-scale-applied-twice",
    ),
)

FAULTS: dict[str, Fault] = {f.name: f for f in (*_CONTRACT, *_OPERATOR, *_OBJECT, *_DOUBLE)}

#: Changes that must change no bit.
CONTROLS: dict[str, Fault] = {
    f.name: f
    for f in (
        Fault(
            "attention-recomputed",
            "control",
            "the door of the attention faults, without a fault",
            "",
            "equal",
            interventions=inject.same_attention,
        ),
        Fault(
            "projection-recomputed",
            "control",
            "the door of the projection faults, without a fault",
            "",
            "equal",
            interventions=inject.same_projection,
            dtype="float32",
        ),
        Fault(
            "other-page-size", "control", "pages of 8 tokens, other block tables", "", "equal", right={"block_size": 8}
        ),
        Fault("prefill-chunks", "control", "prompts prefilled 7 tokens at a time", "", "equal", right={"chunk": 7}),
        Fault(
            "decode-against-prefill", "control", "one pass against decoding", "", "equal", right={"phase": "prefill"}
        ),
        Fault("two-ranks", "control", "2 tensor-parallel ranks against 1", "", "equal", right={"tensor_parallel": 2}),
        Fault("four-ranks", "control", "4 tensor-parallel ranks against 1", "", "equal", right={"tensor_parallel": 4}),
        Fault(
            "override-without-effect",
            "control",
            "an override that says what holds anyway",
            "",
            "equal",
            overrides=("layers.*.mlp.act: rounding.silu=float32",),
        ),
    )
}
