"""Run by test_kernel_operators.py: logprobs and gradients of a strict Megatron-core, by arrays or by kernels.

``python -m tests.integration.megatron_gradients arrays|kernels OUT``; kernels with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from diffcheck.base.models import resolve_model
from diffcheck.capture.adapter import open_adapter
from diffcheck.capture.plan import EngineOptions
from integration.backends.kernels import KernelOperators
from integration.megatron import plugin, sums

PROFILE, SEQUENCES, LENGTH = "strict-v1/fma32-seq", 2, 9


def main(which: str, out: str) -> None:
    """Forward and backward of two sequences; writes each parameter's gradient and the logprobs."""
    if which == "kernels":
        made: Any = lambda profile, dtype, *_, **__: KernelOperators(profile, dtype)  # noqa: E731
        plugin.operators_for = made
    folder, config = resolve_model("tiny-qwen3")
    options = EngineOptions("megatron", folder, dtype="float32", profile=PROFILE, max_length=64)
    model: Any = getattr(open_adapter(options, lambda *_: None), "model")  # noqa: B009 - of this engine only
    ids = torch.randint(3, 500, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = ids[:, :-1], ids[:, 1:]
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    live = dict(model.named_parameters())
    sums.keep(live.values())
    logits = model(tokens, torch.arange(LENGTH).expand(SEQUENCES, LENGTH), mask)
    logprobs = plugin.logprobs(model, logits, targets, vocabulary=config.vocab_size, temperature=0.7)
    (-logprobs.mean()).backward()
    found = {name: sums.gradient(parameter) for name, parameter in live.items()}
    torch.save({"logprobs": logprobs.detach(), **{n: g.detach().clone() for n, g in found.items()}}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
