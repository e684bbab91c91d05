"""What really runs in a live vLLM worker: the facts a reader needs to believe, or repeat, a verdict."""

from __future__ import annotations

import os
from typing import Any

from diffcheck.capture.live import CAUSAL

#: Environment that decides which kernels run; the rest of vLLM's names the machine or the run.
_TELLING = ("VLLM_CPU_", "VLLM_USE_", "VLLM_BATCH_", "VLLM_ENABLE_", "OMP_", "KMP_")


def engine_evidence(runner: Any, model: Any) -> dict[str, Any]:
    """Backends, layouts, switches and threads of this worker, read from its live objects."""
    import torch

    config = runner.vllm_config
    layer = model.model.layers[0]
    attention = layer.self_attn.attn
    spec = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    compilation = config.compilation_config
    return {
        "model_class": _name(model),
        "model_runner": _name(runner),
        "executor": str(config.parallel_config.distributed_executor_backend),
        "attention_backend": _name(attention.impl),
        "attention_isa": getattr(attention, "isa", None),
        "operators": {
            "rms_norm": _forward_name(layer.input_layernorm),
            "rotary_emb": _forward_name(layer.self_attn.rotary_emb),
            "silu_and_mul": _forward_name(layer.mlp.act_fn),
            "linear": _name(layer.self_attn.qkv_proj.quant_method),
        },
        "dtype": str(runner.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(attention.kv_cache_dtype),
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


def attention_mask(model: Any) -> str:
    """Kind of the mask that the live attention of layer 0 applies."""
    window = getattr(model.model.layers[0].self_attn.attn.impl, "sliding_window", None)
    size = window[0] if isinstance(window, tuple) else window
    return CAUSAL if size is None or size < 0 else f"{CAUSAL}, window {size}"


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
