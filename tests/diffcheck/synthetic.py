"""Small consistent pairs of traces, made in memory: what two engines of a 2-layer model might have recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from diffcheck.base.bits import UIntArray
from diffcheck.base.boundaries import graph
from diffcheck.base.record import KvMapping, ObjectRecord
from diffcheck.base.samples import Sample
from diffcheck.rows import expected_rows
from diffcheck.trace.reader import Trace
from diffcheck.trace.schema import Header
from diffcheck.trace.writer import TraceWriter
from reference.models.config import ModelConfig

CONFIG = ModelConfig.from_dict(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 11,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
)
SAMPLES = (Sample((3, 4, 5), (6, 7)), Sample((9,), (1, 2, 3)))
GRAPH = graph(CONFIG)
ROWS = expected_rows(SAMPLES)

Values = dict[str, tuple[UIntArray, str]]


def values(seed: int = 0) -> Values:
    """Random bfloat16 patterns for every boundary, float32 for the logprobs."""
    rng = np.random.default_rng(seed)
    out: Values = {}
    for node in GRAPH:
        x = rng.standard_normal((len(ROWS[node.rows]), node.width), np.float32).view(np.uint32)
        is_float32 = node.name in ("logprobs", "logsumexp")
        out[node.name] = (x, "float32") if is_float32 else ((x >> 16).astype(np.uint16), "bfloat16")
    return out


def record() -> ObjectRecord:
    lengths = [s.forward_length for s in SAMPLES]
    return ObjectRecord(
        model=asdict(CONFIG),
        weights={"model.norm.weight": "aa", "lm_head.weight": "bb"},
        token_ids=[list(s.token_ids[:-1]) for s in SAMPLES],
        target_ids=[list(s.response_token_ids) for s in SAMPLES],
        positions=[list(range(n)) for n in lengths],
        active=[[int(p in s.response_positions) for p in range(s.forward_length)] for s in SAMPLES],
        rope={"theta": 1e4},
        kv=KvMapping("paged", 16, [list(range(i * 16, i * 16 + n)) for i, n in enumerate(lengths)]),
        real_vocab=CONFIG.vocab_size,
        padded_vocab=64,
    )


def header(engine: str = "vllm", level: str = "full") -> Header:
    return Header(
        engine=engine,
        versions={},
        tensor_parallel=1,
        dtype="bfloat16",
        phase="decode",
        level=level,
        object=record(),
        boundaries={},
        samples=[s.to_json() for s in SAMPLES],
    )


def write(folder: Path, patterns: Mapping[str, tuple[UIntArray, str]], head: Header | None = None) -> Trace:
    """Write a trace; at level sampled every second row is stored."""
    head = head or header()
    writer = TraceWriter(folder, head.level)
    for name, (bits, dtype) in patterns.items():
        stored = np.arange(0, bits.shape[0], 2) if head.level == "sampled" else None
        writer.put(name, bits, dtype, stored)
    writer.finish(head)
    return Trace(folder)


def pair(folder: Path, change: Callable[[Values], object], level: str = "full") -> tuple[Trace, Trace]:
    """Two traces that differ by what ``change`` does to the right one's values."""
    left, right = values(), values()
    change(right)
    folder.mkdir(parents=True, exist_ok=True)
    return (
        write(folder / "left", left, header("vllm", level)),
        write(folder / "right", right, header("megatron", level)),
    )


def flip(name: str, row: int, index: int = 0, bit: int = 0) -> Callable[[Values], object]:
    """A change that inverts one bit."""

    def change(patterns: Values) -> None:
        bits, dtype = patterns[name]
        bits[row, index] ^= bits.dtype.type(1 << bit)
        patterns[name] = (bits, dtype)

    return change


def without(head: Header, name: str, reason: str) -> Header:
    """A header that says why a boundary could not be observed."""
    return replace(head, unobserved={**head.unobserved, name: reason})
