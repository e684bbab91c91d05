"""Time of the kernels beside a named peer: ``python -m fastpath.benchmarks [--json OUT] [--only NAME] [--tune]``.

Peer and ours are captured as CUDA graphs over rotating copies of the weights (so that no cache holds them) and replayed
in turns within one run; medians and their ratio are reported. ``--tune`` measures every candidate schedule instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from fastpath.backend import UnsupportedError, current_target
from fastpath.benchmarks import kernels
from fastpath.benchmarks.contest import COPIES, ROTATION, Contest, medians
from fastpath.products.linear import linear
from fastpath.products.lm_head import lm_head_logprob
from fastpath.products.row_linear import row_linear
from fastpath.products.schedules import Schedule, candidates
from reference.contract.profiles import profile
from reference.files import write_atomically

#: model, layer, operator, outputs, inputs.
LAYERS = (
    ("Qwen3-0.6B", "qkv", "linear", 4096, 1024),
    ("Qwen3-0.6B", "o", "row_linear", 1024, 2048),
    ("Qwen3-0.6B", "gate_up", "linear", 6144, 1024),
    ("Qwen3-0.6B", "down", "row_linear", 1024, 3072),
    ("Qwen3-8B", "qkv", "linear", 6144, 4096),
    ("Qwen3-8B", "o", "row_linear", 4096, 4096),
    ("Qwen3-8B", "gate_up", "linear", 24576, 4096),
    ("Qwen3-8B", "down", "row_linear", 4096, 12288),
    ("Qwen3-8B", "lm_head", "linear", 151936, 4096),
)
TOKENS = (1, 8, 64, 256, 4096)
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"linear": linear, "row_linear": row_linear}


@dataclass(frozen=True)
class Operands:
    """One layer's input and rotating copies of its weight: bfloat16 for matrix units, float32 for fma32-seq."""

    operator: str
    contract: Any
    x: torch.Tensor
    weights: list[torch.Tensor]

    def ours(self, plan: Schedule | None = None) -> Callable[[int], torch.Tensor]:
        """Our product of a copy."""
        function = FUNCTIONS[self.operator]
        return lambda copy: function(self.x, self.weights[copy], self.contract, plan=plan)

    def peer(self) -> Callable[[int], torch.Tensor]:
        """cuBLAS's product of a copy (no TF32)."""
        out = torch.empty(self.x.shape[0], self.weights[0].shape[0], dtype=self.x.dtype, device=self.x.device)
        return lambda copy: torch.mm(self.x, self.weights[copy].t(), out=out)


def operands(operator: str, outputs: int, inputs: int, tokens: int, unit: str) -> Operands:
    """Random operands of a layer."""
    name = "float32" if unit == "fma32-seq" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    copies = max(1, min(COPIES, -(-ROTATION // (outputs * inputs * dtype.itemsize))))
    weights = [torch.randn(outputs, inputs, device="cuda").to(dtype) for _ in range(copies)]
    x = torch.randn(tokens, inputs, device="cuda").to(dtype)
    return Operands(operator, profile(f"strict-v1/{unit}").contract(operator, name), x, weights)


def product_contest(name: str, made: Operands, functions: dict[str, Callable[[int], Any]]) -> Contest:
    """``functions`` on the operands, with what they must compute and move."""
    (tokens, inputs), outputs = made.x.shape, made.weights[0].shape[0]
    least = made.x.dtype.itemsize * (outputs * inputs + tokens * (inputs + outputs))
    facts = {"operator": made.operator, "tokens": tokens, "outputs": outputs, "inputs": inputs}
    peer = f"cuBLAS {made.x.dtype}".replace("torch.", "")
    return Contest(name, peer, functions, len(made.weights), 2.0 * tokens * outputs * inputs, float(least), facts)


def layer_contest(name: str, operator: str, outputs: int, inputs: int, tokens: int, unit: str) -> Contest:
    """cuBLAS beside ours on one layer."""
    made = operands(operator, outputs, inputs, tokens, unit)
    return product_contest(name, made, {"peer": made.peer(), "ours": made.ours()})


def head_contest(tokens: int) -> Contest:
    """The fused head beside cuBLAS, log_softmax and gather, on Qwen3-8B's head."""
    chosen = profile("strict-v1/hopper-k16")
    head, lse, logprob = (chosen.contract(name) for name in ("lm_head", "logsumexp", "logprob"))
    x = torch.randn(tokens, 4096, device="cuda").bfloat16()
    weight = (torch.randn(151936, 4096, device="cuda") / 64).bfloat16()
    targets = torch.randint(0, 151936, (tokens,), device="cuda")

    def peer(_: int) -> torch.Tensor:
        logits = torch.mm(x, weight.t())
        return torch.log_softmax(logits, -1, dtype=torch.float32).gather(1, targets[:, None])

    def ours(_: int) -> Any:
        return lm_head_logprob(x, weight, targets, head, lse, logprob)  # type: ignore[arg-type]

    memory = {name: _peak_bytes(lambda f=f: f(0)) for name, f in (("peer", peer), ("ours", ours))}  # type: ignore[misc]
    operations, least = 2.0 * tokens * 151936 * 4096, 2.0 * (151936 * 4096 + tokens * 4096)
    facts = {"tokens": tokens, "memory_bytes": memory, "memory_ratio": memory["ours"] / memory["peer"]}
    name = f"Qwen3-8B/lm_head_logprob/hopper-k16/M={tokens}"
    return Contest(
        name, "cuBLAS bfloat16 + log_softmax float32", {"peer": peer, "ours": ours}, 1, operations, least, facts
    )


def _peak_bytes(function: Callable[[], Any]) -> int:
    """Device memory that one call needs beyond what was allocated before."""
    function()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def contests() -> Iterator[tuple[str, Callable[[], Contest]]]:
    """Name and maker of every contest."""
    for model, layer, operator, outputs, inputs in LAYERS:
        for unit in current_target().units:
            for tokens in TOKENS:
                if unit == "fma32-seq" and (tokens not in (8, 4096) or layer == "lm_head"):
                    continue
                name = f"{model}/{layer}/{unit}/M={tokens}"
                arguments = (name, operator, outputs, inputs, tokens, unit)
                yield name, partial(layer_contest, *arguments)
    if "hopper-k16" in current_target().units:
        for tokens in (64, 4096):
            yield f"Qwen3-8B/lm_head_logprob/hopper-k16/M={tokens}", partial(head_contest, tokens)
    yield from kernels.contests()


def run(only: str, rounds: int) -> list[dict[str, Any]]:
    """Hold every contest whose name contains ``only``."""
    results = []
    for name, make in contests():
        if only not in name:
            continue
        contest = make()
        calls = max(1, min(20, int(4e-3 / _estimate(contest))))
        seconds = medians(contest, rounds, calls)
        results.append(_result(contest, seconds))
        print(_line(results[-1]), flush=True)
        del contest
        torch.cuda.empty_cache()
    return results


def _estimate(contest: Contest) -> float:
    return max(contest.operations / 4e14, contest.bytes / 4e12, 2e-6)


def _result(contest: Contest, seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "name": contest.name,
        "peer": contest.peer,
        "peer_us": round(seconds["peer"] * 1e6, 2),
        "ours_us": round(seconds["ours"] * 1e6, 2),
        "ratio": round(seconds["ours"] / seconds["peer"], 3),
        "ours_tflops": round(contest.operations / seconds["ours"] / 1e12, 1),
        "ours_gbs": round(contest.bytes / seconds["ours"] / 1e9, 1),
        **contest.facts,
    }


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['name']:<44} peer {result['peer_us']:>9.2f} us  ours {result['ours_us']:>9.2f} us  "
        f"x{result['ratio']:.3f}  {result['ours_tflops']:>6.1f} TFLOP/s {result['ours_gbs']:>7.1f} GB/s"
    )


def tune(only: str, rounds: int) -> list[dict[str, Any]]:
    """Time of every candidate schedule on every layer, best first, beside cuBLAS."""
    results = []
    for model, layer, operator, outputs, inputs in LAYERS:
        for unit in current_target().units:
            for tokens in TOKENS:
                name = f"{model}/{layer}/{unit}/M={tokens}"
                if only not in name or tokens == 1 or (unit == "fma32-seq" and (tokens != 4096 or layer != "qkv")):
                    continue
                made = operands(operator, outputs, inputs, tokens, unit)
                plans = candidates(current_target(), unit, tokens, 8 if operator == "row_linear" else 1)
                raced = product_contest(name, made, {"peer": made.peer(), **_usable(made, plans)})
                calls = max(1, min(10, int(2e-3 / _estimate(raced))))
                seconds = medians(raced, rounds, calls)
                peer = seconds.pop("peer")
                ranking = sorted((value / peer, plan) for plan, value in seconds.items())
                results.append({"name": name, "peer_us": peer * 1e6, "ranking": ranking})
                print(f"{name:<44} peer {peer * 1e6:9.2f} us", flush=True)
                for ratio, plan in ranking[:3]:
                    print(f"    x{ratio:.3f} {plan}", flush=True)
                del made, raced
                torch.cuda.empty_cache()
    return results


def _usable(made: Operands, plans: list[Schedule]) -> dict[str, Callable[[int], Any]]:
    """Functions of the plans that this machine can hold: a tile may need more shared memory than there is."""
    usable: dict[str, Callable[[int], Any]] = {}
    for plan in plans:
        try:
            made.ours(plan)(0)
        except (UnsupportedError, triton.runtime.errors.OutOfResources) as error:
            print(f"    {plan}: {error}", flush=True)
            continue
        usable[json.dumps(plan.as_dict())] = made.ours(plan)
    return usable


def main() -> int:
    """Run and write the report."""
    parser = argparse.ArgumentParser(prog="python -m fastpath.benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--only", default="", help="only names that contain this")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tune", action="store_true", help="measure every candidate schedule")
    arguments = parser.parse_args()
    results = (tune if arguments.tune else run)(arguments.only, arguments.rounds)
    report = {
        "command": " ".join(["python", "-m", "fastpath.benchmarks", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "ceilings": ceilings(),
        "results": results,
    }
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(report, indent=1) + "\n")
    return 0


def ceilings() -> dict[str, float]:
    """What the device reaches: bytes per second of a copy (read and write), operations per second of cuBLAS."""
    source, sink = (torch.empty(2**27, device="cuda") for _ in range(2))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    f32 = [torch.randn(4096, 4096, device="cuda") for _ in range(2)]
    seconds: dict[str, float] = {}
    for name, function in (
        ("copy", lambda _: sink.copy_(source)),
        ("bf16", lambda _: a @ b),
        ("fp32", lambda _: f32[0] @ f32[1]),
    ):  # each alone: a copy is slower in turns with products, which take the card's power
        seconds |= medians(Contest("ceilings", "", {name: function}, 1, 0, 0), 10, 2)
    return {
        "copy_bytes_per_s": 2 * 2**29 / seconds["copy"],
        "cublas_bf16_flops": 2 * 8192**3 / seconds["bf16"],
        "cublas_fp32_flops": 2 * 4096**3 / seconds["fp32"],
    }
