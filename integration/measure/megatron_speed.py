"""Milliseconds of a Megatron-core forward and backward: ``python -m integration.measure.megatron_speed --out FILE``.

Both arms in one command, each in a process of its own, on one folder of random weights; the fastest of several steps
counts. Native is Megatron's local specification, the one that needs no other package.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from diffcheck.base.progress import silent
from integration.measure.machine import facts, prepare_environment, write
from integration.measure.vllm_speed import SHAPE

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="JSON to write.")],
    layers: int = 8,
    sequences: int = 4,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
    profile: str = "strict-v1/hopper-k16",
    rounds: int = 5,
    arm: Annotated[str, typer.Option(help="One arm, of --folder; empty runs both.")] = "",
    folder: Path | None = None,
) -> None:
    """Measure native and strict."""
    prepare_environment()
    if arm and folder is not None:
        found = _step_times(folder, profile if arm == "strict" else None, sequences, length, rounds)
        write(out, {"arm": arm, **found})
        return
    with tempfile.TemporaryDirectory(prefix="rlk-shape-") as scratch:
        model = Path(scratch) / "model"
        _make_model(model, layers)
        result: dict[str, Any] = {**facts(), "layers": layers, "sequences": sequences, "length": length}
        for name in ("native", "strict"):
            partial = Path(scratch) / f"{name}.json"
            options = {"out": partial, "arm": name, "folder": model, "sequences": sequences, "length": length}
            flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
            command = [sys.executable, "-m", "integration.measure.megatron_speed", *flags, "--profile", profile]
            subprocess.run([*command, "--rounds", str(rounds)], check=True)
            result[name] = json.loads(partial.read_text())
    for what in ("forward_ms", "forward_backward_ms"):
        result[f"{what} strict over native"] = round(result["strict"][what] / result["native"][what], 3)
        typer.echo(f"{what}: {result['native'][what]:.1f} native, {result['strict'][what]:.1f} strict")
    write(out, result)


def _make_model(folder: Path, layers: int) -> None:
    import torch
    from safetensors.torch import save_file

    from reference.models.config import ModelConfig
    from reference.models.weights import weight_shapes

    folder.mkdir()
    config = {**SHAPE, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {}
    for name, shape in weight_shapes(ModelConfig.from_dict(config)):
        noise = torch.randn(shape, generator=generator, device="cuda")
        tensors[name] = (1 + 0.1 * noise if name.endswith("norm.weight") else 0.02 * noise).bfloat16().cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _step_times(folder: Path, profile: str | None, sequences: int, length: int, rounds: int) -> dict[str, Any]:
    import torch

    from diffcheck.capture.adapter import open_adapter
    from diffcheck.capture.plan import EngineOptions

    options = EngineOptions("megatron", folder, dtype="bfloat16", device="cuda", profile=profile, max_length=length + 1)
    model: Any = getattr(open_adapter(options, silent), "model")  # noqa: B009 - of this engine only
    ids = torch.randint(3, SHAPE["vocab_size"], (sequences, length + 1), device="cuda")
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    positions = torch.arange(length, device="cuda").expand(sequences, length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").triu(1)

    def logprobs() -> Any:
        from megatron.core import tensor_parallel

        from integration.megatron import plugin

        logits = model(tokens, positions, mask)
        if profile:
            return plugin.logprobs(model, logits, targets, vocabulary=logits.shape[-1])
        # [sequence, batch, vocabulary] in Megatron, whose cross entropy adds over its vocabulary
        return -tensor_parallel.vocab_parallel_cross_entropy(logits.float(), targets)

    def forward() -> None:
        with torch.no_grad():
            logprobs()

    def both() -> None:
        model.zero_grad()
        (-logprobs().mean()).backward()

    def fastest(run: Any) -> float:
        run()
        times = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return 1e3 * min(times)

    return {
        "forward_backward_ms": fastest(both),
        "forward_ms": fastest(forward),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


if __name__ == "__main__":
    app()
