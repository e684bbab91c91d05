"""Speed and memory of the reference forward, one core: suite ``model`` of ``python -m reference.benchmarks``.

Times are processor seconds of one thread, the best of a few runs: other work on the machine disturbs them little.
Weights are random: no time depends on values, except that operands whose products underflow take a slower path.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from reference.checks import Float32Array
from reference.contract.profiles import profile
from reference.formats import BFLOAT16
from reference.models.config import ModelConfig
from reference.models.qwen3 import forward
from reference.models.weights import weight_shapes
from reference.rounding import round_to

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
    qk_norm=True,
    qkv_bias=False,
    o_bias=False,
)
#: One layer of Qwen3-8B at real widths, with a small vocabulary: the layer is what is measured.
LAYER_8B = replace(
    TINY,
    num_hidden_layers=1,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
FMA, CDNA3, HOPPER = "strict-v1/fma32-seq", "strict-v1/mfma-cdna3-g8", "strict-v1/hopper-k16"


@dataclass(frozen=True)
class Measurement:
    """One timed forward."""

    what: str
    seconds: float
    #: Target in seconds, or None.
    target: float | None = None


def measurements() -> Iterator[Measurement]:
    """The forwards with targets, then how time grows with tokens, width, layers and the matrix unit."""
    yield Measurement("tiny Qwen3 (2 layers, hidden 64), 256 tokens", seconds(TINY, 256), 0.3)
    yield Measurement("tiny, 512 tokens", seconds(TINY, 512))
    yield Measurement(
        "tiny, hidden and MLP doubled", seconds(replace(TINY, hidden_size=128, intermediate_size=256), 256)
    )
    yield Measurement("tiny, 4 layers", seconds(replace(TINY, num_hidden_layers=4), 256))
    yield Measurement("tiny, mfma-cdna3-g8", seconds(TINY, 256, CDNA3))
    yield Measurement("tiny, hopper-k16", seconds(TINY, 256, HOPPER))
    yield Measurement("tiny, 64 decode steps of 1 sequence", seconds(TINY, 64, phase="decode"))
    yield Measurement("Qwen3-8B layer, 16 tokens, fma32-seq", seconds(LAYER_8B, 16, FMA, runs=1), 3.0)
    yield Measurement("Qwen3-8B layer, 16 tokens, mfma-cdna3-g8", seconds(LAYER_8B, 16, CDNA3, runs=1), 12.0)
    yield Measurement("Qwen3-8B layer, 16 tokens, hopper-k16", seconds(LAYER_8B, 16, HOPPER, runs=1))


def seconds(config: ModelConfig, tokens: int, name: str = FMA, runs: int = 3, phase: str = "prefill") -> float:
    """Processor seconds to score one sequence whose first ``tokens`` tokens are fed, best of ``runs``."""
    weights = random_weights(config)
    sequence = np.random.default_rng(1).integers(0, config.vocab_size, tokens + 1).tolist()
    chosen = profile(name)
    forward(weights, config, [sequence[:2]], chosen)  # tables and caches
    best = np.inf
    for _ in range(runs):
        start = time.process_time()
        forward(weights, config, [sequence], chosen, phase=phase)  # type: ignore[arg-type]
        best = min(best, time.process_time() - start)
    return float(best)


def random_weights(config: ModelConfig) -> dict[str, Float32Array]:
    """Bfloat16 weights of about the size of trained ones."""
    generator = np.random.default_rng(0)
    made = {}
    for name, shape in weight_shapes(config):
        values = generator.standard_normal(shape, np.float32) * np.float32(
            shape[-1] ** -0.5 if len(shape) == 2 else 0.1
        )
        made[name] = round_to(values + np.float32(len(shape) == 1), BFLOAT16)
    return made


def peak_memory() -> float:
    """Peak resident memory of this process, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
