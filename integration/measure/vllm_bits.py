"""A strict vLLM against the NumPy reference: ``python -m integration.measure.vllm_bits --out FILE``.

The engine serves more requests than its cache and its token budget hold, with common prefixes, so that chunked prefill,
prefix hits and preemption happen, under compiled graphs and eagerly; every logprob must have the reference's bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from integration.measure.machine import facts, prepare_environment, write

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="JSON to write.")],
    model: Annotated[str, typer.Option(help="Built-in model or folder.")] = "tiny-qwen3",
    profile: str = "strict-v1/hopper-k16",
    eager: Annotated[bool, typer.Option(help="No compilation and no graphs.")] = False,
    requests: int = 48,
    tokens: int = 40,
    checked: Annotated[int, typer.Option(help="Requests whose logprobs the NumPy reference computes too.")] = 48,
) -> None:
    """Generate, then compare every logprob in bits."""
    prepare_environment()
    from integration.vllm import plugin

    plugin.prepare(profile)
    from vllm import LLM, SamplingParams

    from diffcheck.base.models import resolve_model
    from integration.vllm import following

    folder, config = resolve_model(model)
    engine = LLM(
        str(folder),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        block_size=16,
        num_gpu_blocks_override=128,
        gpu_memory_utilization=0.15,
        enforce_eager=eager,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    engine.collective_rpc(following.follow)
    rng = np.random.default_rng(5)
    common = rng.integers(3, config.vocab_size, 48).tolist()
    prompts = [
        (common if i % 2 else []) + rng.integers(3, config.vocab_size, int(rng.integers(3, 100))).tolist()
        for i in range(requests)
    ]
    shapes = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 20, 1.0), (1.3, 0, 0.9)]
    settings = [shapes[i % len(shapes)] for i in range(requests)]
    params = [
        SamplingParams(
            temperature=t, top_k=k, top_p=p, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        for t, k, p in settings
    ]
    engine.collective_rpc(following.begin)
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    evidence = engine.collective_rpc(following.finish)[0]
    answers = [list(o.outputs[0].token_ids) for o in outputs]
    found = [_logprobs(o.outputs[0]) for o in outputs]
    differing, compared = 0, 0
    for mine, theirs in zip(
        found[:checked], _reference(folder, config, profile, prompts, answers, settings, checked), strict=True
    ):
        compared += mine.size
        differing += int((mine.view(np.uint32) != theirs.view(np.uint32)).sum())
    result = {
        **facts(),
        "model": model,
        "profile": profile,
        "eager": eager,
        "logprobs": {"generated": sum(map(len, answers)), "compared": compared, "differing": differing},
        "evidence": evidence,
        "engine": engine.collective_rpc(following.describe)[0],
    }
    write(out, result)
    typer.echo(f"{model} {profile} eager={eager}: {differing} of {compared} logprobs differ; {evidence['scheduler']}")
    typer.echo(f"graphs {evidence.get('graphs')}")
    raise typer.Exit(0 if compared and not differing else 1)


def _logprobs(output: Any) -> Any:
    chosen = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    # vLLM hands floats on: every one of them is a float32
    return np.array(chosen, np.float64).astype(np.float32)


def _reference(
    folder: Path, config: Any, profile: str, prompts: list[Any], answers: list[Any], settings: list[Any], count: int
) -> list[Any]:
    from safetensors import safe_open

    from reference.contract.profiles import profile as find_profile
    from reference.models.qwen3 import Sampling, forward

    weights = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            weights[name] = file.get_tensor(name).float().numpy()
    found = []
    for prompt, answer, (t, k, p) in list(zip(prompts, answers, settings, strict=True))[:count]:
        sampling = Sampling(temperature=t, top_k=k or None, top_p=p)
        batch, lengths = [prompt + answer], [len(prompt)]
        scored = forward(
            weights, config, batch, find_profile(profile), prompt_lengths=lengths, sampling=sampling, dtype="bfloat16"
        )
        found.append(scored.logprobs[0])
    return found


if __name__ == "__main__":
    app()
