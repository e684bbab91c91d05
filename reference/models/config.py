"""Shape of a dense decoder (Qwen3, Qwen2, Llama), read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Architectures whose forward the reference specifies. Each is RMSNorm, rotary embedding, grouped-query attention and
#: SwiGLU; they differ in QK-norm and in which projections carry a bias.
SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")


class UnsupportedModelError(ValueError):
    """The folder holds a model that this project does not specify."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that decides which operators run, and on which shapes. Sizes are in elements."""

    architecture: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    #: Vocabulary as the tokenizer knows it: padding rows of an engine's own making are not part of it.
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    #: Keys normalised per head before RoPE (Qwen3).
    qk_norm: bool
    #: Bias on q, k and v (Qwen2; Llama and Qwen3 where the config says so).
    qkv_bias: bool
    #: Bias on the attention output projection.
    o_bias: bool
    #: dtype of the checkpoint, by torch's name.
    dtype: str = "bfloat16"

    @property
    def q_size(self) -> int:
        """Features of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config as ``transformers`` writes it (both the 4.x and the 5.x spelling of RoPE and dtype).

        Raises:
            UnsupportedModelError: the architecture, activation, RoPE kind or sliding window is not specified here; it
                is named.
        """
        architectures = config.get("architectures") or ["(none given)"]
        name = architectures[0]
        if name not in SUPPORTED_ARCHITECTURES:
            raise UnsupportedModelError(
                f"architecture {name} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModelError(f"hidden_act {act!r} is not supported; only 'silu' is")
        if config.get("use_sliding_window"):
            raise UnsupportedModelError("use_sliding_window is not supported by the dense forward")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise UnsupportedModelError(f"rope_type {kind!r} is not supported; only 'default' is")
        if config.get("mlp_bias"):
            raise UnsupportedModelError("mlp_bias is not supported")
        heads = int(config["num_attention_heads"])
        is_qwen2 = name == "Qwen2ForCausalLM"
        bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=name,
            num_hidden_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=name == "Qwen3ForCausalLM",
            qkv_bias=is_qwen2 or bias,
            o_bias=bias and not is_qwen2,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``folder/config.json``.

        Raises:
            FileNotFoundError: no such folder, or no config in it.
            UnsupportedModelError: see `from_dict`; also a field that is missing or not a number, by name.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; a model folder holds config.json and *.safetensors")
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path}: {error}") from None
        except KeyError as error:
            raise UnsupportedModelError(f"{path}: field {error} is missing") from None
        except (TypeError, ValueError) as error:
            raise UnsupportedModelError(f"{path}: {error}") from None
