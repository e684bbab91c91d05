"""Tokens per second of vLLM: ``python -m integration.measure.vllm_speed --arm strict --out FILE``.

One engine a process; the arms are compared by `integration.measure.ratios`. Decode is the difference of two lengths, so
that prefill and start cost nothing; the fastest of several rounds counts. Weights are made on the device.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from integration.measure.machine import facts, prepare_environment, write

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
#: Qwen3-8B.
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="JSON to write.")],
    arm: Annotated[str, typer.Option(help="native, strict or invariant (vLLM's own batch-invariant mode).")] = "strict",
    layers: int = 36,
    profile: str = "strict-v1/hopper-k16",
    sequences: Annotated[str, typer.Option(help="Numbers of sequences, comma separated.")] = "8,64,256",
    prompt: int = 256,
    generate: int = 128,
    rounds: int = 2,
    captured: Annotated[
        str, typer.Option(help="Further numbers of tokens that graphs are captured for; the least prefill by default.")
    ] = "",
    trace: Annotated[bool, typer.Option(help="Also list the device kernels of a decode step.")] = False,
) -> None:
    """Measure one arm."""
    prepare_environment()
    options: dict[str, Any] = {}
    if arm == "strict":
        from integration.vllm import plugin

        plugin.prepare(profile)
    elif arm == "invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        options["attention_config"] = {"backend": "TRITON_ATTN"}
    import numpy as np
    import torch
    from vllm import LLM, SamplingParams

    counts = [int(n) for n in sequences.split(",")]
    sizes = {1, *counts, *(map(int, captured.split(",")) if captured else (prompt * min(counts),))}
    folder = Path(tempfile.mkdtemp(prefix="rlk-shape-"))
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
    start = time.perf_counter()
    engine = LLM(
        str(folder),
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=2048,
        max_num_seqs=max(counts),
        gpu_memory_utilization=0.85,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": sorted(sizes)},
        seed=0,
        **options,
    )
    result: dict[str, Any] = {**facts(), "arm": arm, "layers": layers, "start_s": round(time.perf_counter() - start, 1)}
    compilation = engine.llm_engine.vllm_config.compilation_config
    result["compilation"] = {
        "mode": str(compilation.mode),
        "graphs": str(compilation.cudagraph_mode),
        "sizes": list(compilation.cudagraph_capture_sizes),
    }
    rng = np.random.default_rng(1)

    def seconds(n: int, length: int) -> float:
        prompts = [{"prompt_token_ids": rng.integers(1000, 150000, prompt).tolist()} for _ in range(n)]
        params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    for n in counts:
        seconds(n, 8)
        short = min(seconds(n, 1) for _ in range(rounds))
        long = min(seconds(n, 1 + generate) for _ in range(rounds))
        result[str(n)] = {
            "prefill_tok_s": round(n * prompt / short),
            "decode_tok_s": round(n * generate / (long - short)),
        }
        typer.echo(f"{arm} n={n} {result[str(n)]}")
    if trace:
        result["kernels"] = _kernels(lambda: seconds(counts[0], 4))
    write(out, result)


def _kernels(run: Any) -> dict[str, Any]:
    """Device kernels of ``run`` by name: launches and microseconds, those inside of graphs too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as measured:
        run()
    rows = sorted(measured.key_averages(), key=lambda row: -row.device_time_total)
    return {row.key[:100]: [row.count, round(row.device_time_total, 1)] for row in rows if row.device_time_total}


if __name__ == "__main__":
    app()
