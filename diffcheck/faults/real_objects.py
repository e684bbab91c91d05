"""Faults in what real engines compute, not in how: tokens, positions, masks and weights."""

from __future__ import annotations

from diffcheck.faults.changes import Change
from diffcheck.faults.runs import (
    BOTH,
    NATIVE,
    STALE_PREFIX,
    TIED,
    RealFault,
    Run,
    Setup,
    known,
    refused,
)

_Q_WEIGHT = "model.layers.0.self_attn.q_proj.weight"
_ADAPTER = "weights.adapter"

TOKENS = (
    known(
        "positions-count-padding",
        *(refused(e, "positions", Change(f"{e}.positions", {"order": "padded"})) for e in BOTH),
    ),
    RealFault(
        "positions-zigzag",
        "miles 885",
        "positions are in context parallelism's zigzag order, tokens are not",
        tuple(
            refused(e, "positions", Change(f"{e}.positions", {"order": "zigzag"}), plan={"phase": "prefill"})
            for e in BOTH
        ),
    ),
    known("tokens-re-encoded", *(refused(e, "token_ids", right_plan={"split_token": 5}) for e in BOTH)),
    known("logprobs-shifted", *(refused(e, "alignment", Change(f"{e}.late_logprobs")) for e in BOTH)),
    RealFault(
        "labels-not-shifted",
        "ms-swift 8196, prime-rl 1525",
        "the loss scores each position's own token, not the next one",
        tuple(
            refused("megatron", "target_ids", Change("megatron.unshifted_labels"), setup=s) for s in (Setup(), NATIVE)
        ),
    ),
    RealFault(
        "mask-dropped",
        "wrong kind of attention mask",
        "attention sees later positions",
        (refused("megatron", "attention_mask", Change("megatron.no_mask"), setup=NATIVE),),
    ),
    RealFault(
        "window-on-one-side",
        "wrong kind of attention mask",
        "attention keeps to a window of 8 tokens",
        (refused("vllm", "attention_mask", Change("vllm.attention", {"sliding_window": 8}), setup=NATIVE),),
    ),
    RealFault(
        "rope-theta",
        "wrong RoPE base",
        "the rotary embedding was made with another theta",
        tuple(refused(e, "rope.theta", Change(f"{e}.rope_table", {"theta": 5e5}), setup=NATIVE) for e in BOTH),
    ),
    RealFault(
        "weight-version-stale",
        "SkyRL 2246",
        "samples were drawn from older weights than they say",
        tuple(refused(e, "weight_version", plan={"weight_version": 8}, right_plan={"weight_version": 7}) for e in BOTH),
    ),
)

WEIGHTS = (
    known(
        "old-weights",
        *(refused(e, "weights.", Change("weights.stale", {"patterns": ["*"]})) for e in BOTH),
        refused("vllm", "weights.", Change("weights.stale", {"patterns": ["*"]}), setup=NATIVE),
    ),
    RealFault(
        "partial-sync",
        "NeMo-RL 4018",
        "an update left the second layer out",
        tuple(
            refused(
                e,
                "weights.model.layers.1.",
                Change("weights.stale", {"patterns": ["model.layers.1.*"]}),
            )
            for e in BOTH
        ),
    ),
    known(
        "stale-head",
        *(refused(e, "weights.lm_head.weight", Change("weights.stale", {"patterns": ["lm_head.*"]})) for e in BOTH),
    ),
    RealFault(
        "tied-head-stale",
        "torchtitan 2402, prime-rl 2438",
        "a tied head keeps a copy of the embedding that an update has passed by",
        (
            refused("vllm", "weights.lm_head.weight", Change("weights.stale_tied_head"), setup=TIED),
            Run("megatron", "logits", changes=(Change("megatron.stale_tied_head"),), setup=TIED),
        ),
    ),
    known(
        "lora-merged-in-bf16",
        *(
            refused(
                e,
                f"weights.{_Q_WEIGHT}",
                Change(_ADAPTER, {"name": _Q_WEIGHT, "merge": "bfloat16"}),
                healthy=(Change(_ADAPTER, {"name": _Q_WEIGHT, "merge": "float32"}),),
            )
            for e in BOTH
        ),
    ),
    RealFault(
        "lora-on-one-side",
        "NeMo-RL 3696",
        "the adapter is merged on one side only",
        tuple(
            refused(e, f"weights.{_Q_WEIGHT}", healthy=(Change(_ADAPTER, {"name": _Q_WEIGHT, "merge": "float32"}),))
            for e in BOTH
        ),
    ),
    RealFault(
        "fused-update-torn",
        "weight sync by parts",
        "an update sends q without k and v, whose module vLLM then fills with what happens to be there",
        tuple(
            refused("vllm", "weights.model.layers.0.self_attn.", Change("weights.torn", {"name": _Q_WEIGHT}), setup=s)
            for s in (Setup(), NATIVE)
        ),
    ),
    RealFault(
        "weight-bit-flipped",
        "weights changed behind the engine's back",
        "one bit of one live weight is another one",
        tuple(
            refused(
                e,
                "weights.model.layers.1.mlp.down_proj.weight",
                Change("weights.flipped", {"name": "model.layers.1.mlp.down_proj.weight", "index": 40, "bit": 0}),
            )
            for e in BOTH
        ),
    ),
    RealFault(
        "gate-up-swapped",
        "weight mapping",
        "the mapping takes gate for up and up for gate",
        tuple(
            refused(
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
            for e in BOTH
        ),
    ),
    RealFault(
        "qkv-not-interleaved",
        "weight mapping",
        "Megatron's fused projection holds q, k and v one after the other, not by key-value group",
        (refused("megatron", "weights.model.layers.0.self_attn.", Change("weights.not_interleaved", {"layer": 0})),),
    ),
    known("stale-prefix-cache", STALE_PREFIX),
)
