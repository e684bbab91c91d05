"""What really runs in a live vLLM worker: the facts a reader needs to believe, or repeat, a verdict."""

from __future__ import annotations

import os
from typing import Any

from diffcheck.live_model.experts import STRICT_SEE
from diffcheck.live_model.facts import fold

#: Environment that decides which kernels run; the rest of vLLM's names the machine or the run.
_TELLING = ("VLLM_CPU_", "VLLM_USE_", "VLLM_BATCH_", "VLLM_ENABLE_", "OMP_", "KMP_")


def engine_evidence(runner: Any, model: Any) -> dict[str, Any]:
    """Backends, layouts, switches and threads of this worker, read from its live objects."""
    import torch

    config = runner.vllm_config
    layers = dict(enumerate(model.model.layers))
    attention = layers[0].self_attn.attn

    def of(read: Any) -> Any:
        """The same of every layer, or by layer."""
        return fold({f"layer {n}": read(layer) for n, layer in layers.items()})

    spec = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    compilation = config.compilation_config
    return {
        "model_class": _name(model),
        "model_runner": _name(runner),
        "executor": str(config.parallel_config.distributed_executor_backend),
        "attention_backend": of(lambda layer: _name(layer.self_attn.attn.impl)),
        "attention_isa": getattr(attention, "isa", None),
        "operators": {
            "rms_norm": of(lambda layer: _forward_name(layer.input_layernorm)),
            "rotary_emb": of(lambda layer: _forward_name(layer.self_attn.rotary_emb)),
            "silu_and_mul": of(
                lambda layer: _experts(layer.mlp) if hasattr(layer.mlp, "experts") else _forward_name(layer.mlp.act_fn)
            ),
            "linear": of(lambda layer: _name(layer.self_attn.qkv_proj.quant_method)),
        },
        "dtype": str(runner.dtype).removeprefix("torch."),
        "kv_cache_dtype": of(lambda layer: str(layer.self_attn.attn.kv_cache_dtype)),
        "kv_cache_shape": list(attention.kv_cache.shape),
        "kv_cache_blocks": int(runner.kv_cache_config.num_blocks),
        "block_size": int(spec.block_size),
        "eager": bool(config.model_config.enforce_eager),
        "compilation_mode": str(getattr(compilation, "mode", None)),
        "custom_ops": list(compilation.custom_ops),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "device": _device(runner.device),
        "threads": torch.get_num_threads(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_TELLING)},
    }


def _experts(block: Any) -> str:
    """What computes the experts of a sparse block, activation included."""
    if hasattr(block, STRICT_SEE):
        return f"inside {_name(block)}"
    kernel = getattr(block.experts.routed_experts.quant_method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    isa = getattr(experts, "isa", None)
    return f"inside {_name(experts)}" + (f", {isa}" if isa else "")


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _forward_name(module: Any) -> str:
    """Which of a custom operator's implementations was chosen when it was built."""
    method = getattr(module, "_forward_method", None)
    return f"{type(module).__qualname__}.{getattr(method, '__name__', 'forward')}"


def _device(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"
