"""A tiny decoder with random weights, in every supported architecture."""

from __future__ import annotations

from typing import Any

import numpy as np

from reference.checks import Float32Array
from reference.formats import FORMATS
from reference.models.config import ModelConfig
from reference.models.weights import weight_shapes
from reference.rounding import round_to

QWEN3 = ModelConfig(
    architecture="Qwen3ForCausalLM",
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=16,
    vocab_size=101,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
    qk_norm=True,
    qkv_bias=False,
    o_bias=False,
)


def config(**changes: Any) -> ModelConfig:
    """``QWEN3`` with some fields changed."""
    return ModelConfig(**{**QWEN3.__dict__, **changes})


def weights(c: ModelConfig, dtype: str = "bfloat16", seed: int = 0) -> dict[str, Float32Array]:
    """Random weights whose activations keep a size of about 1."""
    generator = np.random.default_rng(seed)
    made = {}
    for name, shape in weight_shapes(c):
        values = generator.standard_normal(shape)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif len(shape) == 2 and "embed" not in name:
            values *= 1.5 / np.sqrt(shape[1])
        made[name] = round_to(values, FORMATS[dtype])
    return made


def batch(*lengths: int, vocabulary: int = 101, seed: int = 1) -> list[list[int]]:
    """Random sequences of the given lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocabulary, length).tolist() for length in lengths]
