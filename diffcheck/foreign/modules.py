"""What the modules of a decoder gave, as boundaries: which tensor of which module is which boundary.

Two trees are known. Hugging Face's: one module an operator; SwiGLU and attention are no modules, so that their values
are the inputs of the projections behind them. And the fused one that vLLM and SGLang share: ``qkv_proj``,
``gate_up_proj``, norms that also return the residual sum, ``act_fn`` as the whole of SwiGLU, ``attn`` as attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from reference.models.config import ModelConfig

_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)")
_PREFIXES = ("module.", "model.", "language_model.")
#: Modules whose output is the boundary of the same name, in both trees.
_PLAIN = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm", "self_attn.k_norm",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
#: Projection -> the boundary that its input is.
_READS = {"self_attn.o_proj": "self_attn.attention", "mlp.down_proj": "mlp.act"}


def bare(path: str) -> str:
    """A module's path below the decoder: ``layers.0.mlp.down_proj`` of ``model.layers.0.mlp.down_proj``."""
    while prefix := next((p for p in _PREFIXES if path.startswith(p)), ""):
        path = path[len(prefix) :]
    return path


def boundaries_of(
    path: str, inputs: Sequence[Any], outputs: Sequence[Any], config: ModelConfig
) -> Iterator[tuple[str, Any]]:
    """(boundary, tensor) of what one module received and gave; nothing for a module that is no operator here.

    Args:
        path: of the module, see `bare`.
        inputs, outputs: tensors in order; inputs are empty where the dump has none.
    """
    if path == "embed_tokens":
        yield from zip(("embed_tokens",), outputs, strict=False)
    elif path == "lm_head":
        yield from zip(("logits",), outputs, strict=False)
    elif path == "norm":
        yield from _norm("norm", f"layers.{config.num_hidden_layers - 1}.mlp_residual", inputs, outputs)
    elif (found := _LAYER.fullmatch(path)) is not None:
        yield from _of_layer(int(found[1]), found[2], inputs, outputs, config)


def _norm(name: str, stream: str | None, inputs: Sequence[Any], outputs: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """A norm, and the residual stream it reads: its second output where it forms the sum itself, else its input."""
    if outputs:
        yield name, outputs[0]
    if stream is None:
        return
    if len(outputs) == 2:
        yield stream, outputs[1]
    elif len(inputs) == 1:
        yield stream, inputs[0]


def _of_layer(
    n: int, path: str, inputs: Sequence[Any], outputs: Sequence[Any], config: ModelConfig
) -> Iterator[tuple[str, Any]]:
    name = f"layers.{n}.{path}"
    prefix = f"layers.{n}"
    if path == "input_layernorm":
        yield from _norm(name, f"layers.{n - 1}.mlp_residual" if n else None, inputs, outputs)
    elif path == "post_attention_layernorm":
        yield from _norm(name, f"{prefix}.attn_residual", inputs, outputs)
    elif path == "self_attn.qkv_proj" and outputs:
        sizes = (config.q_size, config.kv_size, config.kv_size)
        yield from _split(outputs[0], [f"{prefix}.self_attn.{x}_proj" for x in "qkv"], sizes)
    elif path == "mlp.gate_up_proj" and outputs:
        half = config.intermediate_size
        yield from _split(outputs[0], [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], (half, half))
    elif path == "self_attn.rotary_emb" and len(outputs) == 2:
        yield from zip((f"{prefix}.self_attn.q_rope", f"{prefix}.self_attn.k_rope"), outputs, strict=True)
    elif path == "self_attn.attn" and outputs:
        yield f"{prefix}.self_attn.attention", outputs[0]
    elif path == "mlp.act_fn" and not inputs and outputs:
        # Only dumps of the fused tree have no inputs; Hugging Face's act_fn is the gate alone.
        yield f"{prefix}.mlp.act", outputs[0]
    elif path in _PLAIN:
        yield from ((name, output) for output in outputs[:1])
        if path in _READS:
            yield from ((f"{prefix}.{_READS[path]}", tensor) for tensor in inputs[:1])


def _split(fused: Any, names: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, Any]]:
    if fused.shape[-1] == sum(sizes):
        yield from zip(names, fused.split(list(sizes), dim=-1), strict=True)
