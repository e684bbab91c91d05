"""One strict Megatron-core model's gradients under several batchings: run as a script, once for each number of ranks.

``python -m torch.distributed.run --nproc-per-node RANKS -m tests.integration.sums_run OUT`` writes the SHA-256 of every
gradient in HF names, by setting. In a process of its own, since the release of Megatron-core is what PYTHONPATH says.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from diffcheck.base.models import resolve_model
from diffcheck.capture.adapter import open_adapter
from diffcheck.capture.megatron.weights import to_hf
from diffcheck.capture.plan import EngineOptions
from integration.megatron import functions, plugin, sums
from tests.integration.strict_cases import PROFILE, batch, quiet

Tensor = Any
#: Eight sequences, none alike, padded to the longest of their micro-batch.
MICRO_BATCHES = (1, 2, 4, 8)


def main(out: Path, model: str = "tiny-qwen3-tied", dtype: str = "bfloat16") -> None:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    path, _ = resolve_model(model)
    options = EngineOptions("megatron", path, dtype=dtype, profile=PROFILE, max_length=128, tensor_parallel=ranks)
    adapter: Any = open_adapter(options, quiet)
    sizes = MICRO_BATCHES if dtype == "bfloat16" else MICRO_BATCHES[-1:]
    found = {f"micro-batch {size}": digests(adapter, kept(adapter, size)) for size in sizes}
    _no_device_randomness()
    adapter.model.config.recompute_granularity = "full"
    adapter.model.config.recompute_method, adapter.model.config.recompute_num_layers = "uniform", 1
    found["recomputed"] = digests(adapter, kept(adapter, 4))
    torch.set_num_threads(1)
    found["one thread"] = digests(adapter, kept(adapter, 4))
    adapter.model.config.recompute_granularity = None
    if ranks == 1:
        with OnCpu():
            found["main_grad"] = digests(adapter, with_ddp(adapter))
    if rank == 0:
        import megatron.core

        out.write_text(json.dumps({"version": megatron.core.__version__, "found": found}))
    adapter.close()


def _no_device_randomness() -> None:
    """Megatron-core's recomputation asks CUDA for the state of its random numbers, of which a CPU has none."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None


class OnCpu(TorchFunctionMode):  # type: ignore[misc]
    """Megatron-core's optimizer makes its scalars on the device "cuda", whatever the model is on."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def rows(size: int) -> list[list[list[int]]]:
    ids = [list(sample.token_ids) for sample in batch()]
    return [ids[first : first + size] for first in range(0, len(ids), size)]


def backward(adapter: Any, ids: list[list[int]], model: Any) -> None:
    """Sum of negative logprobs of one right-padded micro-batch."""
    width = max(map(len, ids)) - 1
    padded = torch.tensor([row + [0] * (width + 1 - len(row)) for row in ids])
    tokens, targets = padded[:, :-1].contiguous(), padded[:, 1:].contiguous()
    mask = torch.ones(1, 1, width, width, dtype=torch.bool).triu(1)
    positions = torch.arange(width).expand(len(ids), width)
    logits = model(tokens, positions, mask)
    values = plugin.logprobs(adapter.model, logits, targets, vocabulary=adapter.config.vocab_size, temperature=0.8)
    real = torch.tensor([[column < len(row) - 1 for column in range(width)] for row in ids])
    (-values[real]).sum().backward()


def kept(adapter: Any, size: int) -> dict[str, Tensor]:
    """Gradients in sums of their own."""
    live = dict(adapter.model.named_parameters())
    sums.keep(live.values())
    for ids in rows(size):
        backward(adapter, ids, adapter.model)
    found = {name: sums.gradient(parameter) for name, parameter in live.items()}
    assert all(gradient is not None for gradient in found.values())
    sums.release(live.values())
    if adapter.options.tensor_parallel > 1:
        group = adapter.model.output_layer.tp_group
        for name in found:
            if "q_layernorm" in name or "k_layernorm" in name:
                found[name] = functions.sum_ranks(found[name], group)
    return found  # type: ignore[return-value]


def with_ddp(adapter: Any) -> dict[str, Tensor]:
    """Through Megatron's own data-parallel wrapper and its float32 gradient buffer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(adapter.model.config, settings, adapter.model)
    live = dict(adapter.model.named_parameters())
    sums.keep(live.values())
    wrapped.zero_grad_buffer()
    for ids in rows(2):
        backward(adapter, ids, wrapped)
    sums.into_main_grads(live.values())
    _finish(wrapped)
    found = {name: parameter.main_grad.clone() for name, parameter in live.items()}
    sums.release(live.values())
    # Without sums of their own: added to main_grad in place, micro-batch by micro-batch.
    wrapped.zero_grad_buffer()
    for ids in rows(1):
        backward(adapter, ids, wrapped)
    _finish(wrapped)
    for name, parameter in live.items():
        if "q_layernorm" not in name and "k_layernorm" not in name and "word_embeddings" not in name:
            assert torch.equal(parameter.main_grad, found[name]), name
        assert torch.allclose(parameter.main_grad, found[name], rtol=1e-3, atol=1e-4), name
    if adapter.options.dtype == "float32":  # Megatron's bfloat16 optimizer wants tensors of CUDA
        step(wrapped, live)
    return found


def _finish(wrapped: Any) -> None:
    """Nothing is sent with one data-parallel rank, and 0.19 asks CUDA for its stream before it finds out."""
    if torch.cuda.is_available():
        wrapped.finish_grad_sync()


def step(wrapped: Any, live: dict[str, Tensor]) -> None:
    """Megatron's own optimizer, with the gradients that its buffer holds; it clips only those of CUDA."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0), [wrapped])
    before = {name: parameter.detach().clone() for name, parameter in live.items()}
    assert optimizer.step()[0]
    assert not any(torch.equal(before[name], parameter) for name, parameter in live.items())


def digests(adapter: Any, gradients: dict[str, Tensor]) -> dict[str, str]:
    """SHA-256 of each gradient, float32, whole, in HF names."""

    def whole(name: str) -> list[Tensor]:
        return functions.gather_ranks(gradients[name].contiguous(), adapter.model.output_layer.tp_group)

    found = {}
    for name, gradient in to_hf(whole, adapter.config):
        # -0 and +0 add alike: a gradient of nothing has no sign.
        found[name] = hashlib.sha256((gradient.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
