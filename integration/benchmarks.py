"""Time of the strict path against the same engine's native one, on this machine: ``python -m integration.benchmarks``.

Rollout: milliseconds a decode step of eight requests in vLLM, logprobs included. Training: milliseconds a forward and
backward of eight sequences of 96 tokens in Megatron-core. Each arm runs in a process of its own; the arms take turns
and the fastest round of each counts, so that other work on the machine disturbs the ratio least.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffcheck.base.progress import silent

PROFILE = "strict-v1/fma32-seq"
ROUNDS = 3
REQUESTS, GENERATE, WIDTH = 8, 64, 96
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def rollout(folder: Path, dtype: str) -> float:
    """Milliseconds a decode step of the vLLM that ``RLK_PROFILE`` chooses."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=REQUESTS,
        skip_tokenizer_init=True,
        async_scheduling=False,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": list(range(5 + i, 25 + i))} for i in range(REQUESTS)]
    shape: dict[str, Any] = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(max_tokens=GENERATE, **shape)
    return _fastest(lambda: llm.generate(prompts, params, use_tqdm=False)) / GENERATE


def training(folder: Path, dtype: str) -> float:
    """Milliseconds a forward and backward of the Megatron-core that ``RLK_PROFILE`` chooses."""
    import torch

    from diffcheck.capture.adapter import open_adapter
    from diffcheck.capture.plan import EngineOptions

    profile = os.environ.get("RLK_PROFILE")
    options = EngineOptions("megatron", folder, dtype=dtype, profile=profile, max_length=2 * WIDTH)
    model: Any = getattr(open_adapter(options, silent), "model")  # noqa: B009 - of this engine only
    ids = torch.randint(3, 500, (REQUESTS, WIDTH + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = ids[:, :-1], ids[:, 1:]
    mask = torch.ones(1, 1, WIDTH, WIDTH, dtype=torch.bool).triu(1)

    def step() -> None:
        from megatron.core import tensor_parallel

        from integration.megatron import plugin

        model.zero_grad()
        logits = model(tokens, torch.arange(WIDTH).expand(REQUESTS, WIDTH), mask)
        if profile:
            logprobs = plugin.logprobs(model, logits, targets, vocabulary=logits.shape[-1])
        else:
            logprobs = -tensor_parallel.vocab_parallel_cross_entropy(logits.float(), targets)
        (-logprobs.mean()).backward()

    return _fastest(step)


def _fastest(run: Callable[[], object]) -> float:
    """Milliseconds of the fastest of some runs, after one to warm up."""
    run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def _arm(what: str, profile: str | None, dtype: str) -> float:
    environment = {**ENVIRONMENT, **os.environ}
    environment.pop("RLK_PROFILE", None)
    if profile:
        environment["RLK_PROFILE"] = profile
    command = [sys.executable, "-m", "integration.benchmarks", what, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{what} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["ms"])


def main() -> None:
    """One arm, if the command line names it; else all, as a table."""
    if len(sys.argv) == 3:
        from diffcheck.base.models import resolve_model

        arms = {"rollout": rollout, "training": training}
        print(json.dumps({"ms": arms[sys.argv[1]](resolve_model("tiny-qwen3")[0], sys.argv[2])}))
        return
    print(f"tiny-qwen3, {REQUESTS} sequences, {os.cpu_count()} cores; milliseconds a step, fastest of 2 x {ROUNDS}")
    for dtype in ("bfloat16", "float32"):
        for what in ("rollout", "training"):
            times: dict[str | None, list[float]] = {None: [], PROFILE: []}
            for _ in range(2):
                for profile, found in times.items():
                    found.append(_arm(what, profile, dtype))
            native, strict = min(times[None]), min(times[PROFILE])
            print(f"{what:9} {dtype:9} native {native:7.2f}  strict {strict:7.2f}  {strict / native:5.2f}x", flush=True)


if __name__ == "__main__":
    main()
