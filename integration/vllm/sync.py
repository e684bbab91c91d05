"""New weights into a live strict vLLM: whole, verified, and with a version that every rollout can be held to.

The weights travel under Hugging Face names. Afterwards each worker digests what it really holds, in the same names and
layout, so that a tensor that was not sent, not loaded or changed on the way is found before the next token is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from diffcheck.capture.vllm.loader import gather_ranks, hf_weights
from diffcheck.record import weight_digest
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
        llm: started with a strict profile.
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
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(sent.items())})
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


def live_digests(worker: Any, config: ModelConfig) -> dict[str, str]:
    """Runs in each worker, on all ranks at once: digests of the weights that its products read."""
    model = worker.model_runner.get_model()
    with _materialised(model):
        return {name: weight_digest(tensor) for name, tensor in hf_weights(model, config, gather_ranks)}


@contextmanager
def _materialised(model: Any) -> Iterator[None]:
    """Give linear layers a tensor of the weight that they keep as an array."""
    import torch

    layers = [module for module in model.modules() if hasattr(module, "rlk_weight")]
    emptied = [layer.weight for layer in layers]
    try:
        for layer in layers:
            layer.weight = torch.nn.Parameter(to_tensor(layer.rlk_weight, layer.rlk_dtype), requires_grad=False)
        yield
    finally:
        for layer, empty in zip(layers, emptied, strict=True):
            layer.weight = empty
