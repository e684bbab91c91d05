"""New weights into a live vLLM: whole, verified, and with a version that every rollout can be held to.

The weights travel under Hugging Face names. Afterwards each worker digests what it really holds, in the same names and
layout, so that a tensor that was not sent, not loaded or changed on the way is found before the next token is drawn.
A native vLLM on a CPU packs a linear layer's weight into a form that nobody can read: there the digest is of what was
packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from diffcheck.base.record import weight_digest
from diffcheck.capture.vllm import loader
from diffcheck.capture.vllm.loader import DIGESTS, gather_ranks, hf_weights
from integration.arrays import to_tensor
from reference.models.config import ModelConfig
from reference.models.weights import weight_shapes

Tensor = Any
#: Attribute of a worker: version of its weights; None while they are being replaced, or after a failure.
VERSION = "rlk_weight_version"


class WeightSyncError(RuntimeError):
    """The engine does not hold the weights that it was sent, or that a rollout asks for. Send them again, whole."""


class WeightSync:
    """The weights of one live ``vllm.LLM``.

    Args:
        llm: started with the recording loader (`diffcheck.capture.vllm.loader`) or with a strict profile.
        config: of its model.
    """

    def __init__(self, llm: Any, config: ModelConfig) -> None:
        self._llm, self._config = llm, config

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, str]:
        """Replace all weights and drop every cached key and value.

        Args:
            weights: (HF name, whole tensor), each weight of the model once.

        Returns:
            HF name -> digest, the same for what was sent and what is live.

        Raises:
            ValueError: a name is missing, foreign, twice there, or of another shape. Nothing was changed.
            WeightSyncError: requests are in flight, or the live weights are not those that were sent.
        """
        sent = self._checked(weights)
        if self._llm.llm_engine.has_unfinished_requests():
            raise WeightSyncError("requests are in flight: their keys and values are of the old weights; abort them")
        self._llm.collective_rpc(set_version, args=(None,))
        self._llm.collective_rpc(reload_weights, args=(list(sent.items()), self._config))
        if not self._llm.llm_engine.reset_prefix_cache():
            raise WeightSyncError("vLLM kept cached keys and values of the old weights")
        digests = {name: weight_digest(tensor) for name, tensor in sent.items()}
        self._require_digests(digests)
        self._llm.collective_rpc(set_version, args=(version,))
        return digests

    def require(self, version: int, digests: Mapping[str, str] | None = None) -> None:
        """Call it before a rollout: that every worker holds ``version``, and, if given, these very weights.

        Raises:
            WeightSyncError: a worker holds another version, a half of one, or other bits.
        """
        for rank, found in enumerate(self._llm.collective_rpc(get_version)):
            if found != version:
                what = "weights of an update that did not finish" if found is None else f"weights of version {found}"
                raise WeightSyncError(f"rank {rank} holds {what}, the rollout asks for version {version}")
        if digests is not None:
            self._require_digests(digests)

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        shapes = dict(weight_shapes(self._config))
        sent: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name not in shapes or name in sent:
                raise ValueError(f"weights: {name} is {'sent twice' if name in sent else 'no weight of this model'}")
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"weights: {name} has shape {tuple(tensor.shape)}, the model needs {shapes[name]}")
            sent[name] = tensor.detach()
        if missing := sorted(set(shapes) - set(sent)):
            raise ValueError(f"weights: {missing[0]} and {len(missing) - 1} others are missing: send all of them")
        return sent

    def _require_digests(self, expected: Mapping[str, str]) -> None:
        live = self._llm.collective_rpc(live_digests, args=(self._config,))[0]
        wrong = [name for name in expected if live.get(name) != expected[name]]
        if wrong:
            raise WeightSyncError(f"{len(wrong)} live weights are not those that were sent, {wrong[0]} for one")


def set_version(worker: Any, version: int | None) -> None:
    """Runs in each worker."""
    setattr(worker, VERSION, version)


def get_version(worker: Any) -> int | None:
    """Runs in each worker."""
    version: int | None = getattr(worker, VERSION, None)
    return version


def reload_weights(worker: Any, weights: list[tuple[str, Tensor]], config: ModelConfig) -> None:
    """Runs in each worker: load ``weights``; what a native layer is about to pack is digested first."""
    model = worker.model_runner.get_model()
    with _loaded_weights() as loaded:
        worker.reload_weights(weights_iterator=weights)
        if not _keeps_arrays(model):
            setattr(model, DIGESTS, _digests(model, config, loaded))


def live_digests(worker: Any, config: ModelConfig) -> dict[str, str]:
    """Runs in each worker, on all ranks at once: digests of the weights that its products read."""
    model = worker.model_runner.get_model()
    if not _keeps_arrays(model):
        return loader.live_digests(model, config)
    digests = _digests(model, config, dict(_arrays(model)))
    # Whoever captures this model now, or asks for its weights, is told of these.
    setattr(model, DIGESTS, digests)
    return digests


def _arrays(model: Any) -> Iterator[tuple[tuple[Any, str], Tensor]]:
    """((layer, attribute), weight) of what the strict layers of ``model`` keep as arrays."""
    import torch

    for layer in model.modules():
        if hasattr(layer, "rlk_weight"):
            yield (layer, "weight"), to_tensor(layer.rlk_weight, layer.rlk_dtype)
        for name, experts in getattr(layer, "rlk_stacked", {}).items():
            yield (layer, name), torch.stack([to_tensor(array, layer.rlk_dtype) for array in experts])


def _keeps_arrays(model: Any) -> bool:
    """Whether linear layers keep a weight that can be read: the strict ones do."""
    return any(hasattr(module, "rlk_weight") for module in model.modules())


@contextmanager
def _loaded_weights() -> Iterator[dict[tuple[Any, str], Tensor]]:
    """(layer, "weight") -> weight, of each unquantised linear layer of vLLM's own that is processed meanwhile."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    loaded: dict[tuple[Any, str], Tensor] = {}
    original = UnquantizedLinearMethod.process_weights_after_loading

    def process(self: Any, layer: Any) -> None:
        loaded[layer, "weight"] = layer.weight.detach()
        original(self, layer)

    UnquantizedLinearMethod.process_weights_after_loading = process
    try:
        yield loaded
    finally:
        UnquantizedLinearMethod.process_weights_after_loading = original


def _digests(model: Any, config: ModelConfig, weights: Mapping[tuple[Any, str], Tensor]) -> dict[str, str]:
    """HF name -> digest, with ``weights`` of the layers that hold an empty tensor in their place."""
    import torch

    emptied = {(layer, name): getattr(layer, name) for layer, name in weights}
    try:
        for (layer, name), weight in weights.items():
            setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))
        return {name: weight_digest(tensor) for name, tensor in hf_weights(model, config, gather_ranks)}
    finally:
        for (layer, name), empty in emptied.items():
            setattr(layer, name, empty)
