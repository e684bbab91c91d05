"""New weights into a live vLLM, in place: every parameter keeps its address, so that captured CUDA graphs read the new
values, and the bytes go from the trainer's memory to vLLM's on the device.

As in `integration.vllm.sync` a version is on the weights only while they are whole, and what the products really read
is digested afterwards; here by `integration.fingerprint`, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diffcheck.capture.vllm.loader import DIGESTS
from integration.fingerprint import fingerprints
from integration.shared_weights import open_shared
from integration.vllm.sync import WeightSyncError, get_version, set_version
from reference.models.config import ModelConfig
from reference.models.weights import weight_shapes

Tensor = Any


class InPlaceSync:
    """The weights of one live ``vllm.LLM`` of one rank. See `integration.vllm.sync.WeightSync`.

    Args:
        llm: of one rank, whose linear layers keep weights that can be read: on a GPU, or strict.
        config: of its model.
    """

    def __init__(self, llm: Any, config: ModelConfig) -> None:
        self._llm, self._config = llm, config

    def update(self, place: dict[str, Any], version: int, digests: Mapping[str, str]) -> None:
        """Replace all weights by those of ``place`` (`SharedWeights.describe`) and drop every cached key and value.

        Args:
            digests: HF name -> fingerprint of what was put there.

        Raises:
            WeightSyncError: requests are in flight, a weight is missing, or the live ones are not those of ``digests``.
            SharingError: the memory cannot be mapped. Nothing was changed.
        """
        if missing := sorted(set(dict(weight_shapes(self._config))) ^ set(digests)):
            raise WeightSyncError(f"{len(missing)} weights are missing or foreign, {missing[0]} for one")
        if self._llm.llm_engine.has_unfinished_requests():
            raise WeightSyncError("requests are in flight: their keys and values are of the old weights; abort them")
        self._llm.collective_rpc(copy_in, args=(place, self._config))
        if not self._llm.llm_engine.reset_prefix_cache():
            raise WeightSyncError("vLLM kept cached keys and values of the old weights")
        self._require_digests(digests)
        self._llm.collective_rpc(set_version, args=(version,))

    def require(self, version: int, digests: Mapping[str, str]) -> None:
        """Call it before a rollout: that the worker holds ``version``, and these very weights.

        Raises:
            WeightSyncError: it does not.
        """
        (found,) = self._llm.collective_rpc(get_version)
        if found != version:
            what = "weights of an update that did not finish" if found is None else f"weights of version {found}"
            raise WeightSyncError(f"vLLM holds {what}, the rollout asks for version {version}")
        self._require_digests(digests)

    def _require_digests(self, expected: Mapping[str, str]) -> None:
        (live,) = self._llm.collective_rpc(live_fingerprints, args=(self._config,))
        wrong = [name for name in expected if live.get(name) != expected[name]]
        if wrong:
            raise WeightSyncError(f"{len(wrong)} live weights are not those that were sent, {wrong[0]} for one")


@dataclass(frozen=True)
class Place:
    """Where a live model keeps one weight of the Hugging Face layout."""

    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]


def copy_in(worker: Any, place: dict[str, Any], config: ModelConfig) -> None:
    """Runs in the worker: copy the weights out of ``place`` into the parameters that are there."""
    import torch

    model = worker.model_runner.get_model()
    sent = open_shared(place)
    set_version(worker, None)
    # What the loader noted is of other weights now; whoever asks gets them from `live_digests`.
    getattr(model, DIGESTS).clear()
    with torch.no_grad():
        for name, own in places(model, config):
            own.write(sent[name])
    if any(tensor.is_cuda for tensor in sent.values()):
        # Before the owner may fill its memory anew.
        torch.cuda.synchronize()


def live_fingerprints(worker: Any, config: ModelConfig) -> dict[str, str]:
    """Runs in the worker: HF name -> fingerprint of the weight that the products read."""
    return fingerprints({name: own.read() for name, own in places(worker.model_runner.get_model(), config)})


def places(model: Any, config: ModelConfig) -> Iterator[tuple[str, Place]]:
    """(HF name, place) of every weight of a model of one rank.

    Raises:
        WeightSyncError: a layer's weight cannot be reached.
    """
    body = model.model
    vocabulary = slice(0, config.vocab_size)
    yield "model.embed_tokens.weight", _rows(body.embed_tokens, "weight", vocabulary)
    for n, layer in enumerate(body.layers):
        yield from _layer(layer, f"model.layers.{n}", config)
    yield "model.norm.weight", _rows(body.norm, "weight")
    if not config.tie_word_embeddings:
        yield "lm_head.weight", _rows(model.lm_head, "weight", vocabulary)
    elif model.lm_head.weight.data_ptr() != body.embed_tokens.weight.data_ptr():
        raise WeightSyncError("the tied head is a copy of the embedding, which would go stale")


def _layer(layer: Any, prefix: str, config: ModelConfig) -> Iterator[tuple[str, Place]]:
    attention, mlp = layer.self_attn, layer.mlp
    yield f"{prefix}.input_layernorm.weight", _rows(layer.input_layernorm, "weight")
    for kind, exists in (("weight", True), ("bias", config.qkv_bias)):
        first = 0
        for name, size in zip("qkv", (config.q_size, config.kv_size, config.kv_size), strict=True):
            if exists:
                part = slice(first, first + size)
                yield f"{prefix}.self_attn.{name}_proj.{kind}", _rows(attention.qkv_proj, kind, part)
            first += size
    if config.qk_norm:
        yield f"{prefix}.self_attn.q_norm.weight", _rows(attention.q_norm, "weight")
        yield f"{prefix}.self_attn.k_norm.weight", _rows(attention.k_norm, "weight")
    yield f"{prefix}.self_attn.o_proj.weight", _rows(attention.o_proj, "weight")
    if config.o_bias:
        yield f"{prefix}.self_attn.o_proj.bias", _rows(attention.o_proj, "bias")
    yield f"{prefix}.post_attention_layernorm.weight", _rows(layer.post_attention_layernorm, "weight")
    size = config.intermediate_size
    yield f"{prefix}.mlp.gate_proj.weight", _rows(mlp.gate_up_proj, "weight", slice(0, size))
    yield f"{prefix}.mlp.up_proj.weight", _rows(mlp.gate_up_proj, "weight", slice(size, 2 * size))
    yield f"{prefix}.mlp.down_proj.weight", _rows(mlp.down_proj, "weight")


def _rows(module: Any, kind: str, part: slice = slice(None)) -> Place:
    """Some rows of a module's parameter; of a strict layer on a CPU, of the array that its products read."""
    if kind == "weight" and hasattr(module, "rlk_weight"):
        from integration.arrays import to_array, to_tensor

        def write_array(value: Tensor) -> None:
            module.rlk_weight[part] = to_array(value)

        return Place(lambda: to_tensor(module.rlk_weight[part], module.rlk_dtype), write_array)
    parameter = getattr(module, kind)
    if parameter.numel() == 0 or parameter.dim() == 0:
        raise WeightSyncError(f"{type(module).__name__} has packed its weight: use transport file")
    view = parameter.detach()[part]
    return Place(lambda: view, view.copy_)
