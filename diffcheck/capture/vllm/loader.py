"""A vLLM model loader that digests every weight as the live model holds it, in HF names and layout.

The digest is taken after loading and before vLLM's post-processing: linear layers on a CPU repack their weight into an
opaque form there and free it. Weights that are loaded into the live model later are digested on their way in.
Registered as load format `LOAD_FORMAT` wherever this module is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm.config.load import LoadConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from diffcheck.base.checkpoint import read_checkpoint
from diffcheck.base.record import weight_digest
from diffcheck.capture.live import flip_bits
from diffcheck.capture.vllm.experts import expert_weights
from reference.models.config import ModelConfig

Tensor = Any
LOAD_FORMAT = "rlk"
#: Key of the loader's extra configuration: [[HF name, flat index, bit], ...].
FLIPS = "rlk_weight_flips"
#: Projections that share a module.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Attribute of the loaded model: HF name -> digest.
DIGESTS = "rlk_weight_digests"


@register_model_loader(LOAD_FORMAT)
class RecordingLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's own loader, with bits flipped on purpose before and digests taken after."""

    def __init__(self, load_config: LoadConfig) -> None:
        plain = copy.copy(load_config)
        plain.load_format = "safetensors"
        plain.model_loader_extra_config = {}
        super().__init__(plain)
        self._flips = [(str(n), int(i), int(b)) for n, i, b in load_config.model_loader_extra_config[FLIPS]]

    def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Take the files that are the model, whatever else lies in its folder."""
        found = super()._prepare_weights(*args, **kwargs)
        files = [str(file) for file in read_checkpoint(Path(found[0])).files]
        return tuple(files if isinstance(part, list) else part for part in found)

    def get_all_weights(self, model_config: Any, model: Any) -> Generator[tuple[str, Tensor], None, None]:
        for name, tensor in super().get_all_weights(model_config, model):
            if any(target == name for target, _, _ in self._flips):
                tensor = flip_bits(name, tensor.to(model_config.dtype), self._flips)
            yield name, tensor

    def load_weights(self, model: Any, model_config: Any) -> None:
        super().load_weights(model, model_config)
        config = ModelConfig.from_dict(model_config.hf_config.to_dict(), live=True)
        setattr(model, DIGESTS, {name: weight_digest(t) for name, t in hf_weights(model, config, gather_ranks)})
        model.load_weights = _digesting(model, model.load_weights, model_config.dtype)


def live_digests(model: Any, config: ModelConfig) -> dict[str, str]:
    """HF name -> digest of the weights that a live model holds: read now where they can be read, as on a GPU; else as
    they were noted when they were packed. All ranks must ask alike.
    """
    if model.model.layers[0].self_attn.qkv_proj.weight.numel():
        setattr(model, DIGESTS, {name: weight_digest(t) for name, t in hf_weights(model, config, gather_ranks)})
    return dict(getattr(model, DIGESTS))


def _digesting(model: Any, load: Callable[[Any], Any], dtype: Any) -> Callable[[Any], Any]:
    """``load`` of a live model, which keeps the digests of what is loaded true.

    vLLM fills a module anew as a whole: weights of it that were not sent hold what happened to be in memory.
    """

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Any:
        digests, sent = getattr(model, DIGESTS), set()

        def passing() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in digests:
                    digests[name] = weight_digest(tensor.to(dtype))
                    sent.add(name)
                yield name, tensor

        loaded = load(passing())
        for name in sent:
            digests |= dict.fromkeys(fused_with(name) - sent, f"undefined: {name} was sent without it")
        return loaded

    return load_weights


def fused_with(name: str) -> set[str]:
    """HF names of all weights in the module that holds ``name``."""
    for group in FUSED:
        for part in group:
            if f".{part}." in name:
                return {name.replace(part, other) for other in group}
    return {name}


def gather_ranks(tensor: Tensor) -> list[Tensor]:
    """This tensor of every tensor-parallel rank, in rank order; moved as bytes. All ranks must call it alike."""
    import torch

    group = get_tp_group()
    if group.world_size == 1:
        return [tensor]
    # Contiguous, whatever the layout, so that every rank sends the same order of elements.
    flat = tensor.detach().contiguous().view(torch.uint8)
    parts = [torch.empty_like(flat) for _ in range(group.world_size)]
    torch.distributed.all_gather(parts, flat, group=group.device_group)
    return [part.view(tensor.dtype) for part in parts]


def hf_weights(
    model: Any, config: ModelConfig, gather: Callable[[Tensor], Sequence[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Weights of a just loaded model under HF names: fused projections taken apart, shards joined, vocabulary padding
    removed. A tied head has no weight of its own, unless it differs from the embedding's: then it is a stale copy.
    """
    body = model.model
    yield "model.embed_tokens.weight", _rows(body.embed_tokens.weight, gather)[: config.vocab_size]
    for n, layer in enumerate(body.layers):
        yield from _layer(layer, f"model.layers.{n}", config, gather)
    yield "model.norm.weight", body.norm.weight
    head, table = model.lm_head.weight, body.embed_tokens.weight
    if not config.tie_word_embeddings or not (head is table or head.equal(table)):
        yield "lm_head.weight", _rows(head, gather)[: config.vocab_size]


def _layer(
    layer: Any, prefix: str, config: ModelConfig, gather: Callable[[Tensor], Sequence[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    attention, mlp = layer.self_attn, layer.mlp
    yield f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    for kind in ("weight", "bias"):
        fused = getattr(attention.qkv_proj, kind, None)
        if fused is not None:
            for name, part in zip("qkv", fused.split(sizes), strict=True):
                width = config.q_size if name == "q" else config.kv_size
                yield f"{prefix}.self_attn.{name}_proj.{kind}", _rows(part, gather, width)
    if config.qk_norm:
        yield f"{prefix}.self_attn.q_norm.weight", attention.q_norm.weight
        yield f"{prefix}.self_attn.k_norm.weight", attention.k_norm.weight
    yield f"{prefix}.self_attn.o_proj.weight", _columns(attention.o_proj.weight, gather)
    if getattr(attention.o_proj, "bias", None) is not None:
        yield f"{prefix}.self_attn.o_proj.bias", attention.o_proj.bias
    yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight
    if hasattr(mlp, "experts"):
        yield from expert_weights(mlp, f"{prefix}.mlp", gather)
        return
    for name, part in zip(("gate", "up"), mlp.gate_up_proj.weight.chunk(2), strict=True):
        yield f"{prefix}.mlp.{name}_proj.weight", _rows(part, gather)
    yield f"{prefix}.mlp.down_proj.weight", _columns(mlp.down_proj.weight, gather)


def _rows(shard: Tensor, gather: Callable[[Tensor], Sequence[Tensor]], width: int | None = None) -> Tensor:
    """Join shards of rows. With fewer key-value heads than ranks, neighbours hold copies of one shard: ``width`` rows
    are what one of each makes.
    """
    import torch

    parts = list(gather(shard))
    if width is not None:
        parts = parts[:: max(1, len(parts) * shard.shape[0] // width)]
    return torch.cat(parts)


def _columns(shard: Tensor, gather: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
    import torch

    return torch.cat(list(gather(shard)), dim=1)
