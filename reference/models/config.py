"""Shape of a decoder (Qwen3, Qwen2, Llama, Qwen3-MoE), read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from reference.models.keys import MOE_ARCHITECTURE, UNDERSTOOD_ROPE, unread_keys
from reference.primitives.rope_scaling import RopeParameters

#: Architectures whose forward the reference specifies. Each is RMSNorm, rotary embedding, grouped-query attention and
#: SwiGLU; they differ in QK-norm, in which projections carry a bias, and in whether a router chooses among MLPs.
SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", MOE_ARCHITECTURE)
#: The ``model_type`` of each, by which transformers chooses a class while vLLM goes by the architecture.
_MODEL_TYPES = dict(zip(SUPPORTED_ARCHITECTURES, ("qwen3", "qwen2", "llama", "qwen3_moe"), strict=True))
#: Defaults of transformers' configuration classes where they are not derived from other fields.
_QWEN3_HEAD_DIM, _QWEN_KV_HEADS, _QWEN_WINDOW, _QWEN_FULL_LAYERS = 128, 32, 4096, 28
_QWEN_MOE_KV_HEADS = 4
#: Architectures that are refused, and what of them is not specified here.
_NOT_SPECIFIED = {
    "Qwen2MoeForCausalLM": "its shared experts",
    "Qwen3NextForCausalLM": "its shared experts and linear attention",
    "DeepseekV2ForCausalLM": "its shared experts, group routing and latent attention",
    "DeepseekV3ForCausalLM": "its shared experts, group routing and latent attention",
    "Glm4MoeForCausalLM": "its shared experts and group routing",
    "MixtralForCausalLM": "its fused expert layout",
    "GptOssForCausalLM": "its expert biases and attention sinks",
}

#: Far above any model there is: a size that a file claims decides how long its reader works.
_LIMITS = {
    "num_hidden_layers": 1000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
}
#: The same of a mixture of experts; 0 in a dense model.
_MOE_LIMITS = {"num_experts": 1 << 12, "num_experts_per_tok": 1 << 12, "moe_intermediate_size": 1 << 22}
#: Fields of `ModelConfig` that only a mixture of experts has.
MOE_FIELDS = (*_MOE_LIMITS, "norm_topk_prob", "dense_layers")
#: Bytes of the largest ``config.json`` that is read.
_FILE_LIMIT = 16 << 20


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
    #: Share of each head's features that RoPE rotates: the first ones.
    partial_rotary_factor: float = 1.0
    #: (name, value) of RoPE's scaling, as transformers' ``rope_parameters`` names them; empty for plain RoPE.
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    #: Per layer, how many newest keys a query sees; None sees all. Empty: no layer has a window.
    layer_windows: tuple[int | None, ...] = ()
    #: Experts of a sparse layer, how many of them a token passes through, and their width; 0 in a dense model.
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    #: Whether the weights of the chosen experts are divided by their sum.
    norm_topk_prob: bool = False
    #: Layers of a mixture of experts that have one MLP of ``intermediate_size`` all the same, ascending.
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # A record that was read from JSON has lists.
        for name in ("rope_scaling", "layer_windows", "dense_layers"):
            if not isinstance(getattr(self, name), list | tuple):
                raise UnsupportedModelError(f"{name} {getattr(self, name)!r} is not a list")
        object.__setattr__(self, "rope_scaling", tuple((str(k), v) for k, v in self.rope_scaling))
        object.__setattr__(self, "layer_windows", tuple(self.layer_windows))
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        if self.layer_windows and len(self.layer_windows) != self.num_hidden_layers:
            raise UnsupportedModelError(
                f"layer_windows has {len(self.layer_windows)} of {self.num_hidden_layers} layers"
            )
        for f in fields(self):
            value, kind = getattr(self, f.name), str(f.type).partition("[")[0]
            if kind == "float" and type(value) is int:
                continue
            if type(value).__name__ != kind:
                raise UnsupportedModelError(f"{f.name} {value!r} is of type {type(value).__name__}, not {kind}")
        for name, most in _LIMITS.items():
            if not 0 < getattr(self, name) <= most:
                raise UnsupportedModelError(f"{name} {getattr(self, name)!r} is not from 1 to {most:,}")
        self._check_experts()
        for name in ("rms_norm_eps", "rope_theta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UnsupportedModelError(f"{name} {getattr(self, name)!r} is not a finite positive number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )

    def _check_experts(self) -> None:
        sparse = self.architecture == MOE_ARCHITECTURE
        for name, most in _MOE_LIMITS.items():
            value = getattr(self, name)
            if not (0 < value <= most if sparse else value == 0):
                wanted = f"from 1 to {most:,}" if sparse else f"0: {self.architecture} is dense"
                raise UnsupportedModelError(f"{name} {value!r} is not {wanted}")
        if not sparse:
            if self.norm_topk_prob or self.dense_layers:
                raise UnsupportedModelError(f"norm_topk_prob or dense_layers in {self.architecture}, which is dense")
            return
        if self.num_experts_per_tok > self.num_experts:
            raise UnsupportedModelError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than num_experts {self.num_experts}"
            )
        layers = range(self.num_hidden_layers)
        if any(type(n) is not int for n in self.dense_layers) or list(self.dense_layers) != sorted(
            set(self.dense_layers) & set(layers)
        ):
            raise UnsupportedModelError(f"dense_layers {self.dense_layers!r} are not ascending layers of {len(layers)}")
        if len(self.dense_layers) == len(layers):
            raise UnsupportedModelError("mlp_only_layers and decoder_sparse_step leave no layer with experts")

    def is_sparse(self, layer: int) -> bool:
        """Whether a router chooses experts in ``layer``."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def q_size(self) -> int:
        """Features of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Features of a head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def rope(self) -> RopeParameters:
        """What the table of cosines and sines is made from."""
        plain = {"rope_type": "default", **dict(self.rope_scaling), "rope_theta": self.rope_theta}
        return RopeParameters.from_rope(plain, self.max_position_embeddings)

    @property
    def rope_base(self) -> float | RopeParameters:
        """What `reference.operators.rope_table` takes: theta, or all parameters of a scaled table."""
        return self.rope if self.rope_scaling else self.rope_theta

    def window(self, layer: int) -> int | None:
        """How many newest keys a query of ``layer`` sees, its own included; None sees all."""
        return self.layer_windows[layer] if self.layer_windows else None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, live: bool = False) -> ModelConfig:
        """Read a config as ``transformers`` writes it (both the 4.x and the 5.x spelling of RoPE and dtype).

        Args:
            live: the config is a running engine's, whose further keys are its library's own; those of the file were
                checked before the engine started.

        Raises:
            UnsupportedModelError: the architecture, activation, RoPE kind or a sliding window is not specified here,
                keys contradict each other, or one that is not understood may change the forward; it is named, with
                what it would change.
        """
        architectures = config.get("architectures") or ["(none given)"]
        name = architectures[0]
        if name not in SUPPORTED_ARCHITECTURES:
            lacking = f" ({_NOT_SPECIFIED[name]} are not specified here)" if name in _NOT_SPECIFIED else ""
            raise UnsupportedModelError(
                f"architecture {name} is not supported{lacking}; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        if (kind := config.get("model_type", _MODEL_TYPES[name])) != _MODEL_TYPES[name]:
            raise UnsupportedModelError(
                f"model_type {kind!r} contradicts architecture {name}: vLLM goes by one, transformers by the other"
            )
        if not live and (unread := list(unread_keys(config, name))):
            raise UnsupportedModelError("; ".join(unread))
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModelError(f"hidden_act {act!r} is not supported; only 'silu' is")
        windows = _windows(config, name)
        rope = rope_of({**config, "rope_theta": None} if live and config.get("rope_parameters") else config)
        try:
            RopeParameters.from_rope(rope, int(config["max_position_embeddings"]))
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from None
        partial = float(rope.pop("partial_rotary_factor", 1.0))
        if not 0 < partial <= 1:
            raise UnsupportedModelError(f"partial_rotary_factor {partial} must be above 0 and at most 1")
        if config.get("mlp_bias"):
            raise UnsupportedModelError("mlp_bias is not supported")
        heads = int(config["num_attention_heads"])
        is_qwen2, is_qwen3, is_moe = (
            name == kind for kind in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", MOE_ARCHITECTURE)
        )
        default_kv = _QWEN_MOE_KV_HEADS if is_moe else _QWEN_KV_HEADS if is_qwen2 or is_qwen3 else heads
        kv_heads = config.get("num_key_value_heads", default_kv)
        head_dim = config.get("head_dim", _QWEN3_HEAD_DIM if is_qwen3 else None)
        bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=name,
            num_hidden_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(kv_heads or heads),
            head_dim=int(head_dim or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope["rope_theta"]),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=is_qwen3 or is_moe,
            qkv_bias=is_qwen2 or bias,
            o_bias=bias and not is_qwen2,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            partial_rotary_factor=partial,
            rope_scaling=tuple((k, v) for k, v in rope.items() if k != "rope_theta" and rope["rope_type"] != "default"),
            layer_windows=windows,
            **(_experts(config) if is_moe else {}),
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
            if path.stat().st_size > _FILE_LIMIT:
                raise UnsupportedModelError(f"larger than the {_FILE_LIMIT:,} bytes that a config can have")
            data = json.loads(path.read_text())
            if not isinstance(data, dict):
                raise UnsupportedModelError(f"holds a {type(data).__name__}, not an object")
            return cls.from_dict(data)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path}: {error}") from None
        except KeyError as error:
            raise UnsupportedModelError(f"{path}: field {error} is missing") from None
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise UnsupportedModelError(f"{path}: {error}") from None


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE parameters of a config in one dictionary, with ``rope_type`` and ``rope_theta``.

    Raises:
        UnsupportedModelError: spellings that contradict each other (each library prefers another one), parameters by
            layer type, or a parameter that is not understood.
    """
    spellings = {}
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            spellings[key] = _one_rope(key, config)
    if len(spellings) == 2 and spellings["rope_parameters"] != spellings["rope_scaling"]:
        a, b = spellings["rope_parameters"], spellings["rope_scaling"]
        differing = [f"{k} {a.get(k)!r} against {b.get(k)!r}" for k in dict.fromkeys((*a, *b)) if a.get(k) != b.get(k)]
        raise UnsupportedModelError(
            f"rope_parameters and rope_scaling contradict each other ({', '.join(differing)}): "
            "some libraries take one, some the other; keep the one that is meant"
        )
    return next(iter(spellings.values()), None) or _one_rope(None, config)


def _one_rope(key: str | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling, completed by the keys beside it."""
    given = config[key] if key else {}
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"{key} must be a dictionary, got {given!r}")
    if nested := [k for k, v in given.items() if isinstance(v, Mapping)]:
        raise UnsupportedModelError(f"{key} by layer type ({', '.join(nested)}) is not supported")
    if unread := [k for k, v in given.items() if k not in UNDERSTOOD_ROPE and v is not None]:
        raise UnsupportedModelError(
            f"{key}.{unread[0]} = {given[unread[0]]!r} is not understood: it may change the angles of RoPE"
        )
    kinds = dict.fromkeys(given[k] for k in ("rope_type", "type") if given.get(k) is not None)
    if len(kinds) > 1:
        raise UnsupportedModelError(
            f"{key}: rope_type and type contradict each other: {' and '.join(map(repr, kinds))}"
        )
    rope = {k: v for k, v in given.items() if k not in ("type", "rope_type") and v is not None}
    rope["rope_type"] = next(iter(kinds), "default")
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", None)):
        beside = config.get(name)
        if beside is not None and rope.setdefault(name, beside) != beside:
            raise UnsupportedModelError(
                f"{name} {beside!r} contradicts {key}.{name} {rope[name]!r}: libraries differ in which they take"
            )
        if default is not None:
            rope.setdefault(name, default)
    if not float(rope["rope_theta"]) > 1:
        raise UnsupportedModelError(f"rope_theta {rope['rope_theta']!r} must be above 1")
    return rope


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a Qwen3-MoE, as transformers' configuration class of it reads and completes them."""
    layers, step = int(config["num_hidden_layers"]), config.get("decoder_sparse_step", 1)
    only = config.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        raise UnsupportedModelError(f"decoder_sparse_step {step!r} must be an integer of at least 1")
    if not isinstance(only, list | tuple) or any(type(n) is not int or not 0 <= n < layers for n in only):
        raise UnsupportedModelError(f"mlp_only_layers {only!r} are not layers from 0 to {layers - 1}")
    # transformers 4 wrote the one name, 5 writes the other.
    numbers = [config[key] for key in ("num_experts", "num_local_experts") if config.get(key) is not None]
    if len(set(map(repr, numbers))) != 1:
        said = "contradict each other" if numbers else "are both missing"
        raise UnsupportedModelError(f"num_experts and num_local_experts {said}")
    if type(norm := config.get("norm_topk_prob", False)) is not bool:
        raise UnsupportedModelError(f"norm_topk_prob {norm!r} must be true or false")
    return {
        "num_experts": int(numbers[0]),
        "num_experts_per_tok": int(config["num_experts_per_tok"]),
        "moe_intermediate_size": int(config["moe_intermediate_size"]),
        "norm_topk_prob": norm,
        "dense_layers": tuple(n for n in range(layers) if n in only or (n + 1) % step),
    }


def _windows(config: Mapping[str, Any], name: str) -> tuple[int | None, ...]:
    """Windows by layer, as transformers' configuration classes of Qwen2 and Qwen3 derive them; empty where none has
    one.
    """
    kinds = config.get("layer_types")
    if foreign := sorted(set(kinds or ()) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(f"layer_types {foreign[0]!r} is not supported: it would change how a layer attends")
    layers = int(config["num_hidden_layers"])
    if kinds is not None and len(kinds) != layers:
        raise UnsupportedModelError(f"layer_types names {len(kinds)} layers of {layers}")
    sliding = "sliding_attention" in (kinds or ())
    if name == "LlamaForCausalLM":
        used = [k for k in ("sliding_window", "use_sliding_window") if config.get(k)]
        if sliding or used:
            key = "layer_types" if sliding else used[0]
            raise UnsupportedModelError(
                f"{key} = {config[key]!r} would change which keys a query sees: vLLM applies it to a Llama, "
                "transformers and Megatron-core do not"
            )
        return ()
    # transformers ignores the window's size unless it is switched on.
    size = config.get("sliding_window", _QWEN_WINDOW) if config.get("use_sliding_window") else None
    if size is None:
        if sliding:
            raise UnsupportedModelError(
                f"layer_types = {kinds!r} contradicts use_sliding_window: which keys a query sees is not defined"
            )
        return ()
    if int(size) < 1:
        raise UnsupportedModelError(f"sliding_window {size!r} must be at least 1")
    first = int(config.get("max_window_layers", _QWEN_FULL_LAYERS))
    by_layer = kinds or ["full_attention" if n < first else "sliding_attention" for n in range(layers)]
    windows = tuple(int(size) if kind == "sliding_attention" else None for kind in by_layer)
    return windows if any(windows) else ()
