"""A Llama-architecture GGUF file as a Hugging Face folder: weights dequantised to bfloat16, tokenizer included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_llama_gguf(source: Path, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer files to ``folder``.

    GGUF interleaves the two rotary halves of each query and key head; the Hugging Face layout keeps them apart, so the
    rows of those projections are put back.
    """
    from transformers import AutoTokenizer

    convert_llama_weights(source, folder)
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(folder)


def convert_llama_weights(source: Path, folder: Path) -> None:
    """As `convert_llama_gguf`, without the tokenizer."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(source)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in ("attn_q", "attn_k"):
                weight = _split_rotary_halves(weight, heads if part == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{_PER_LAYER[part]}.weight"
        else:
            name = f"{_GLOBAL[stem]}.weight"
        tensors[name] = torch.from_numpy(np.ascontiguousarray(weight)).bfloat16()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": value("embedding_length") // heads,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": float(value("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=int))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _split_rotary_halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
