"""Every fault that can be put into real vLLM or real Megatron-core, and the changes that must change no bit there."""

from __future__ import annotations

from typing import Any

from diffcheck.faults.changes import Change
from diffcheck.faults.real_numerics import DOUBLE, NUMERICS, SAMPLING
from diffcheck.faults.real_objects import TOKENS, WEIGHTS
from diffcheck.faults.runs import ALONE, BOTH, NATIVE, Engine, RealFault, Run, Setup

REAL_FAULTS: dict[str, RealFault] = {f.name: f for f in (*NUMERICS, *SAMPLING, *TOKENS, *WEIGHTS, *DOUBLE)}


def control(name: str, cause: str, *runs: Run) -> RealFault:
    return RealFault(name, "control", cause, runs)


def equal(engine: Engine, **more: Any) -> Run:
    return Run(engine, "", "equal", **more)


REAL_CONTROLS: dict[str, RealFault] = {
    f.name: f
    for f in (
        control("healthy-pair", "both engines on the strict profile", *(equal(e) for e in BOTH)),
        control("healthy-alone", "a native engine against itself", *(equal(e, setup=NATIVE) for e in BOTH)),
        control(
            "batch-order",
            "requests in another order",
            equal("vllm", changes=(Change("vllm.batch_order"),)),
            equal(
                "megatron",
                changes=(Change("megatron.batch_order"),),
                setup=Setup(alone=True, right={"micro_batch": 3}),
            ),
        ),
        control(
            "weights-sent-again",
            "an update with the same weights",
            *(equal(e, changes=(Change("weights.sent_again"),)) for e in BOTH),
            equal("vllm", changes=(Change("weights.sent_again"),), setup=NATIVE),
        ),
        control(
            "other-block-size",
            "blocks of 32 tokens",
            equal("vllm", setup=Setup(alone=True, right={"block_size": 32})),
        ),
        control(
            "cache-poisoned-strict",
            "NaN in unused slots of the KV cache: the strict path reads no such slot",
            equal("vllm", changes=(Change("vllm.poisoned_cache"),)),
        ),
        control(
            "chunked-prefill",
            "prompts prefilled 24 tokens at a time",
            equal("vllm", setup=Setup(alone=True, right={"max_num_batched_tokens": 24}), happened="prefill_chunks"),
        ),
        control(
            "micro-batch",
            "three sequences in one padded batch",
            equal("megatron", setup=Setup(alone=True, right={"micro_batch": 3})),
        ),
        control(
            "prefix-cache-hits",
            "prompts found in the prefix cache of the same weights",
            equal(
                "vllm",
                changes=(Change("weights.cached_prefixes", {"stale": False}),),
                happened="prefix_cached_tokens",
            ),
        ),
        control(
            "decode-against-prefill",
            "one pass against decoding",
            equal("vllm", right_plan={"phase": "prefill"}, setup=ALONE),
        ),
        control(
            "two-ranks",
            "2 tensor-parallel ranks against 1",
            *(equal(e, setup=Setup(alone=True, right_ranks=2)) for e in BOTH),
        ),
    )
}
