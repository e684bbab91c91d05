"""Every fault that can be put into a real vLLM or a real Megatron-core, as data, with what must be found.

The healthy pair is exactly equal, so that the fault is the only difference: both engines on the strict profile, or one
native engine against itself. The right side is the faulty one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from diffcheck.faults.changes import Change
from diffcheck.faults.library import CONTROLS, FAULTS, Expected

Engine = Literal["vllm", "megatron"]
STRICT = "strict-v1/fma32-seq"
#: (prompt, response) lengths of a few samples.
Lengths = tuple[tuple[int, int], ...]
#: One sample longer than an attention block, prompts of at least 8 tokens.
LENGTHS: Lengths = ((70, 5), (11, 6), (9, 3))


@dataclass(frozen=True)
class Setup:
    """How the two engines of a pair are started."""

    #: None runs the faulty engine against itself, natively.
    profile: str | None = STRICT
    dtype: str = "bfloat16"
    tied: bool = False
    #: Whether the healthy side is the faulty one's own engine even on the strict profile.
    alone: bool = False
    tensor_parallel: int = 1
    #: Engine options of the right side alone, and its ranks.
    right: dict[str, Any] = field(default_factory=dict)
    right_ranks: int | None = None


@dataclass(frozen=True)
class Run:
    """One injection into one engine."""

    engine: Engine
    #: As in `Fault`.
    where: str
    verdict: Expected = "diverged"
    #: Changes of the right engine, and of the healthy left one.
    changes: tuple[Change, ...] = ()
    healthy: tuple[Change, ...] = ()
    #: As on the command line; the right side's.
    overrides: tuple[str, ...] = ()
    #: Fields of both sides' plans, and of the right one's alone.
    plan: dict[str, Any] = field(default_factory=dict)
    right_plan: dict[str, Any] = field(default_factory=dict)
    setup: Setup = field(default_factory=Setup)
    lengths: Lengths = LENGTHS
    fields: tuple[str, ...] = ()
    unexplained: bool = False
    #: Positions of rows that must stay equal at ``where``, [0, N).
    spared: int = 0
    #: Whether two runs of the right side must disagree.
    unsteady: bool = False
    #: Changes of the right side that make up the second fault of a pair, and its boundary.
    then: tuple[Change, ...] = ()
    then_where: str = ""


@dataclass(frozen=True)
class RealFault:
    """A fault of the field with its injections into real engines."""

    name: str
    reports: str
    cause: str
    runs: tuple[Run, ...]


def _known(name: str, *runs: Run) -> RealFault:
    """A fault that the reference engine knows too."""
    known = {**FAULTS, **CONTROLS}[name]
    return RealFault(name, known.reports, known.cause, runs)


def _contract(name: str, operator: str, value: str, where: str, dtype: str = "bfloat16", **more: Any) -> RealFault:
    """A contract fault, in both engines: ``value`` is FIELD=VALUE."""
    key, _, text = value.partition("=")
    change = Change("strict.contract", {"operator": operator, "fields": {key: text}})
    setup = Setup(dtype=dtype)
    return _known(name, *(Run(e, where, changes=(change,), setup=setup, **more) for e in _BOTH))


def _strict(change: Change, where: str, dtype: str = "bfloat16", **more: Any) -> tuple[Run, ...]:
    """The same change of both engines' operators."""
    return tuple(Run(e, where, changes=(change,), setup=Setup(dtype=dtype), **more) for e in _BOTH)


def _object(engine: Engine, where: str, *changes: Change, **more: Any) -> Run:
    return Run(engine, where, "not_comparable", changes, **more)


_BOTH: tuple[Engine, ...] = ("vllm", "megatron")
_ATTENTION = "layers.0.self_attn.attention"
_Q_ROPE = "layers.0.self_attn.q_rope"
_Q_PROJ = "layers.0.self_attn.q_proj"
_Q_WEIGHT = "model.layers.0.self_attn.q_proj.weight"
_NATIVE = Setup(profile=None, dtype="float32")
_ALONE = Setup(alone=True)
_TIED = Setup(tied=True)
_LONG: Lengths = ((300, 6), (40, 6), (9, 6))
_ADAPTER = "weights.adapter"

_NUMERICS = (
    _contract("rope-bf16-table", "rope", "precision.table=bfloat16", _Q_ROPE, fields=("precision.table",), spared=1),
    _contract(
        "norm-bf16-variance",
        "rms_norm",
        "precision.variance=bfloat16",
        "layers.0.input_layernorm",
        fields=("precision.variance",),
    ),
    _contract(
        "norm-cast-elided",
        "rms_norm",
        "rounding.normalised=bfloat16",
        "layers.0.input_layernorm",
        fields=("rounding.normalised",),
    ),
    _known(
        "norm-fused-residual",
        *_strict(Change("strict.unrounded_sum"), "layers.0.post_attention_layernorm", fields=("rounding.sum",)),
    ),
    _contract("silu-rounded", "swiglu", "rounding.silu=bfloat16", "layers.0.mlp.act", fields=("rounding.silu",)),
    _contract("head-bf16", "lm_head", "rounding.output=bfloat16", "logits", fields=("rounding.output",)),
    _known(
        "logits-not-upcast",
        *_strict(
            Change("strict.contract", {"operator": "logsumexp", "fields": {"rounding.logits": "bfloat16"}}),
            "logsumexp",
        ),
        Run(
            "megatron",
            "logprobs",
            changes=(Change("megatron.narrow_loss", {"dtype": "bfloat16"}),),
            setup=_NATIVE,
        ),
    ),
    _known(
        "log-of-softmax",
        *_strict(
            Change("strict.contract", {"operator": "logprob", "fields": {"order.formula": "log(softmax(x))"}}),
            "logprobs",
        ),
        Run("vllm", "logprobs", changes=(Change("vllm.log_of_softmax"),), setup=_NATIVE),
    ),
    _known(
        "attention-splits",
        *_strict(
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
            changes=(Change("vllm.environment", {"VLLM_CPU_ATTN_SPLIT_KV": "1"}),),
            healthy=(Change("vllm.environment", {"VLLM_CPU_ATTN_SPLIT_KV": "0"}),),
            setup=_NATIVE,
            lengths=_LONG,
        ),
    ),
    _known(
        "rescale-contracted",
        *_strict(
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
    _known(
        "ring-all-reduce",
        Run(
            "megatron",
            "layers.0.self_attn.o_proj",
            changes=(Change("strict.contract", {"operator": "all_reduce", "fields": {"order.merge": "ring"}}),),
            setup=Setup(dtype="float32", alone=True, tensor_parallel=4),
            fields=("order.merge",),
        ),
    ),
    _known(
        "rope-inv-freq",
        *_strict(Change("strict.frequency", {"index": 1}), _Q_ROPE, "float32", spared=1),
        *(Run(e, _Q_ROPE, changes=(Change(f"{e}.rope_table", {"index": 1}),), setup=_NATIVE, spared=1) for e in _BOTH),
    ),
    _known(
        "attention-scale",
        *_strict(Change("strict.attention", {"scale": 1.6}), _ATTENTION, spared=1),
        Run(
            "vllm", _ATTENTION, changes=(Change("vllm.attention", {"scale": ["times", 1.6]}),), setup=_NATIVE, spared=1
        ),
        Run("megatron", _ATTENTION, changes=(Change("megatron.attention", {"scale": 1.6}),), setup=_NATIVE, spared=1),
    ),
    _known(
        "attention-sinks",
        *_strict(Change("strict.attention", {"sink": 0.5}), _ATTENTION),
        Run("vllm", _ATTENTION, changes=(Change("vllm.attention", {"sinks": 0.5}),), setup=_NATIVE),
        Run("megatron", _ATTENTION, changes=(Change("megatron.attention", {"sink": 0.5}),), setup=_NATIVE),
    ),
    _known(
        "gemm-by-batch-size",
        *_strict(Change("strict.small_batches", {"rows": 15, "fields": {"order.k": "descending"}}), _Q_PROJ, "float32"),
    ),
    _known(
        "split-k-by-batch-size",
        *_strict(Change("strict.small_batches", {"rows": 15, "fields": {"partition.segments": 4}}), _Q_PROJ, "float32"),
    ),
    _known(
        "head-adapter-dropped",
        Run(
            "vllm",
            "logits",
            changes=(Change("vllm.head_adapter", {"prompts": False}),),
            healthy=(Change("vllm.head_adapter"),),
            setup=_ALONE,
            right_plan={"phase": "prefill"},
        ),
    ),
    _known(
        "cause-unknown",
        *(Run(e, "layers.0.mlp.act", overrides=("layers.0.mlp.act: flip=0,30,5",), unexplained=True) for e in _BOTH),
    ),
    _known(
        "nondeterministic-loss",
        *_strict(Change("strict.nondeterministic"), "logsumexp", "float32", verdict="inconclusive", unsteady=True),
    ),
    RealFault(
        "padded-vocabulary",
        "unmasked padding columns of the head",
        "columns past the real vocabulary take part in the softmax",
        (
            *(Run(e, "logsumexp", changes=(Change(f"{e}.padded_vocabulary"),)) for e in _BOTH),
            Run("megatron", "logprobs", changes=(Change("megatron.padded_vocabulary"),), setup=_NATIVE),
            Run("vllm", "logprobs", changes=(Change("vllm.padded_vocabulary"),), setup=_NATIVE),
        ),
    ),
    RealFault(
        "kv-scale-applied-twice",
        "KV scale, with the stale prefix of prime-rl 1650",
        "V is stored with a scale that was applied already",
        (
            Run(
                "vllm",
                "layers.0.self_attn.v_cache",
                changes=(Change("vllm.scaled_values", {"factor": 2.0}),),
            ),
        ),
    ),
)

_SAMPLING = (
    _known(
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
    _known(
        "top-p-renormalised",
        *_strict(Change("strict.renormalised", {"top_p": 0.9}), "logsumexp"),
        Run(
            "vllm",
            "processed_logits",
            changes=(Change("vllm.logprobs_mode", {"mode": "processed_logprobs"}),),
            healthy=(Change("vllm.logprobs_mode", {"mode": "raw_logprobs"}),),
            plan={"top_p": 0.9},
            setup=_NATIVE,
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
    _known("temperature-differs", *(_object(e, "temperature", overrides=("object: temperature=0.7",)) for e in _BOTH)),
    RealFault(
        "top-p-differs",
        "trl 6789",
        "one side reports another top-p than the other",
        tuple(_object(e, "top_p", overrides=("object: top_p=0.9",)) for e in _BOTH),
    ),
)

_TOKENS = (
    _known(
        "positions-count-padding",
        *(_object(e, "positions", Change(f"{e}.positions", {"order": "padded"})) for e in _BOTH),
    ),
    RealFault(
        "positions-zigzag",
        "miles 885",
        "positions are in context parallelism's zigzag order, tokens are not",
        tuple(
            _object(e, "positions", Change(f"{e}.positions", {"order": "zigzag"}), plan={"phase": "prefill"})
            for e in _BOTH
        ),
    ),
    _known("tokens-re-encoded", *(_object(e, "token_ids", right_plan={"split_token": 5}) for e in _BOTH)),
    RealFault(
        "logprobs-shifted",
        "ms-swift 8196, prime-rl 1525",
        "every token is given the logprob of the token before it",
        tuple(_object(e, "alignment", Change(f"{e}.late_logprobs")) for e in _BOTH),
    ),
    RealFault(
        "labels-not-shifted",
        "ms-swift 8196, prime-rl 1525",
        "the loss scores each position's own token, not the next one",
        tuple(
            _object("megatron", "target_ids", Change("megatron.unshifted_labels"), setup=s) for s in (Setup(), _NATIVE)
        ),
    ),
    RealFault(
        "mask-dropped",
        "wrong kind of attention mask",
        "attention sees later positions",
        (_object("megatron", "attention_mask", Change("megatron.no_mask"), setup=_NATIVE),),
    ),
    RealFault(
        "window-on-one-side",
        "wrong kind of attention mask",
        "attention keeps to a window of 8 tokens",
        (_object("vllm", "attention_mask", Change("vllm.attention", {"sliding_window": 8}), setup=_NATIVE),),
    ),
    RealFault(
        "rope-theta",
        "wrong RoPE base",
        "the rotary embedding was made with another theta",
        tuple(_object(e, "rope.theta", Change(f"{e}.rope_table", {"theta": 5e5}), setup=_NATIVE) for e in _BOTH),
    ),
    RealFault(
        "weight-version-stale",
        "SkyRL 2246",
        "samples were drawn from older weights than they say",
        tuple(
            _object(e, "weight_version", plan={"weight_version": 8}, right_plan={"weight_version": 7}) for e in _BOTH
        ),
    ),
)

_WEIGHTS = (
    _known(
        "old-weights",
        *(_object(e, "weights.", Change("weights.stale", {"patterns": ["*"]})) for e in _BOTH),
        _object(
            "vllm", "weights.", Change("weights.stale", {"patterns": ["*"]}), setup=_NATIVE
        ),
    ),
    RealFault(
        "partial-sync",
        "NeMo-RL 4018",
        "an update left the second layer out",
        tuple(
            _object(
                e,
                "weights.model.layers.1.",
                Change("weights.stale", {"patterns": ["model.layers.1.*"]}),
            )
            for e in _BOTH
        ),
    ),
    _known(
        "stale-head",
        *(_object(e, "weights.lm_head.weight", Change("weights.stale", {"patterns": ["lm_head.*"]})) for e in _BOTH),
    ),
    RealFault(
        "tied-head-stale",
        "torchtitan 2402, prime-rl 2438",
        "a tied head keeps a copy of the embedding that an update has passed by",
        (
            _object("vllm", "weights.lm_head.weight", Change("weights.stale_tied_head"), setup=_TIED),
            Run("megatron", "logits", changes=(Change("megatron.stale_tied_head"),), setup=_TIED),
        ),
    ),
    _known(
        "lora-merged-in-bf16",
        *(
            _object(
                e,
                f"weights.{_Q_WEIGHT}",
                Change(_ADAPTER, {"name": _Q_WEIGHT, "merge": "bfloat16"}),
                healthy=(Change(_ADAPTER, {"name": _Q_WEIGHT, "merge": "float32"}),),
            )
            for e in _BOTH
        ),
    ),
    RealFault(
        "lora-on-one-side",
        "NeMo-RL 3696",
        "the adapter is merged on one side only",
        tuple(
            _object(e, f"weights.{_Q_WEIGHT}", healthy=(Change(_ADAPTER, {"name": _Q_WEIGHT, "merge": "float32"}),))
            for e in _BOTH
        ),
    ),
    RealFault(
        "weight-bit-flipped",
        "weights changed behind the engine's back",
        "one bit of one live weight is another one",
        tuple(
            _object(
                e,
                "weights.model.layers.1.mlp.down_proj.weight",
                Change("weights.flipped", {"name": "model.layers.1.mlp.down_proj.weight", "index": 40, "bit": 0}),
            )
            for e in _BOTH
        ),
    ),
    RealFault(
        "gate-up-swapped",
        "weight mapping",
        "the mapping takes gate for up and up for gate",
        tuple(
            _object(
                e,
                "weights.model.layers.0.mlp.gate_proj.weight",
                Change(
                    "weights.swapped",
                    {
                        "first": "model.layers.0.mlp.gate_proj.weight",
                        "second": "model.layers.0.mlp.up_proj.weight",
                    },
                ),
            )
            for e in _BOTH
        ),
    ),
    RealFault(
        "qkv-not-interleaved",
        "weight mapping",
        "Megatron's fused projection holds q, k and v one after the other, not by key-value group",
        (_object("megatron", f"weights.{_Q_WEIGHT}", Change("weights.not_interleaved", {"layer": 0})),),
    ),
    _known(
        "stale-prefix-cache",
        Run(
            "vllm",
            "layers.0.self_attn.k_cache",
            changes=(Change("weights.cached_prefixes", {"stale": True}),),
            healthy=(Change("weights.cached_prefixes", {"stale": False}),),
            setup=_ALONE,
        ),
    ),
)

_DOUBLE = (
    _known(
        "rope-bf16-and-fused-norm",
        *_strict(
            Change("strict.contract", {"operator": "rope", "fields": {"precision.table": "bfloat16"}}),
            _Q_ROPE,
            then=(Change("strict.unrounded_sum"),),
            then_where="layers.0.post_attention_layernorm",
        ),
    ),
    RealFault(
        "stale-prefix-and-kv-scale",
        "prime-rl 1650, SkyRL 2246, NeMo-RL 4018; KV scale",
        "two faults at once: a prefix cache of old weights, and V stored with a scale twice",
        (
            Run(
                "vllm",
                "layers.0.self_attn.k_cache",
                changes=(Change("weights.cached_prefixes", {"stale": True}),),
                healthy=(Change("weights.cached_prefixes", {"stale": False}),),
                setup=_ALONE,
                then=(Change("vllm.scaled_values", {"factor": 2.0}),),
                then_where="layers.0.self_attn.v_cache",
            ),
        ),
    ),
)

REAL_FAULTS: dict[str, RealFault] = {f.name: f for f in (*_NUMERICS, *_SAMPLING, *_TOKENS, *_WEIGHTS, *_DOUBLE)}


def _control(name: str, cause: str, *runs: Run) -> RealFault:
    return RealFault(name, "control", cause, runs)


def _equal(engine: Engine, **more: Any) -> Run:
    return Run(engine, "", "equal", **more)


REAL_CONTROLS: dict[str, RealFault] = {
    f.name: f
    for f in (
        _control("healthy-pair", "both engines on the strict profile", *(_equal(e) for e in _BOTH)),
        _control("healthy-alone", "a native engine against itself", *(_equal(e, setup=_NATIVE) for e in _BOTH)),
        _control("batch-order", "samples in another order", *(_equal(e, right_plan={"reverse": True}) for e in _BOTH)),
        _control(
            "other-block-size",
            "blocks of 32 tokens",
            _equal("vllm", setup=Setup(alone=True, right={"block_size": 32})),
        ),
        _control(
            "chunked-prefill",
            "prompts prefilled 24 tokens at a time",
            _equal("vllm", setup=Setup(alone=True, right={"max_num_batched_tokens": 24})),
        ),
        _control(
            "micro-batch",
            "three sequences in one padded batch",
            _equal("megatron", setup=Setup(alone=True, right={"micro_batch": 3})),
        ),
        _control(
            "prefix-cache-hits",
            "prompts found in the prefix cache of the same weights",
            _equal("vllm", changes=(Change("weights.cached_prefixes", {"stale": False}),)),
        ),
        _control(
            "decode-against-prefill",
            "one pass against decoding",
            _equal("vllm", right_plan={"phase": "prefill"}, setup=_ALONE),
        ),
        _control(
            "two-ranks",
            "2 tensor-parallel ranks against 1",
            *(_equal(e, setup=Setup(alone=True, right_ranks=2)) for e in _BOTH),
        ),
    )
}
