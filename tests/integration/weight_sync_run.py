"""Weight updates in a live strict vLLM, told as JSON lines: run by `test_weight_sync` in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffcheck.capture.adapter import open_adapter
from diffcheck.capture.megatron.weights import to_hf
from diffcheck.capture.plan import EngineOptions

PROMPT = list(range(20, 61))
GENERATE = 8


def main() -> None:
    import torch
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    from diffcheck.base.models import resolve_model
    from integration.vllm.sync import WeightSync

    folder, config = resolve_model("tiny-qwen3-tied")
    llm = LLM(
        str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=96,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        async_scheduling=False,
        # so that stale keys and values would be found and used
        enable_prefix_caching=True,
    )
    sync = WeightSync(llm, config)
    old = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    new = {n: (w.float() + 0.02 * torch.randn(w.shape, generator=generator)).bfloat16() for n, w in old.items()}

    def rollout() -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=GENERATE, logprobs=0, ignore_eos=True, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs
        logprobs = [entry[t].logprob for entry, t in zip(answer.logprobs, answer.token_ids, strict=True)]
        return {"tokens": list(answer.token_ids), "logprobs": logprobs}

    def refused(function: Callable[[], Any]) -> str:
        try:
            function()
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "not refused"

    def tell(what: str, value: Any) -> None:
        print(json.dumps({what: value}), flush=True)

    tell("never updated", refused(lambda: sync.require(0)))
    sync.update(old.items(), 1)
    tell("old", rollout())
    digests = sync.update(new.items(), 2)
    sync.require(2, digests)
    tell("new", rollout())
    tell("stale", refused(lambda: sync.require(3)))
    tell("partial", refused(lambda: sync.update(list(new.items())[:-1], 3)))
    sync.require(2, digests)
    layer = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model().model.layers[1]
    layer.mlp.down_proj.rlk_weight[3, 5] *= 2
    tell("changed behind its back", refused(lambda: sync.require(2, digests)))
    torn = dict(new)
    reload = llm.llm_engine.model_executor.driver_worker.worker.model_runner.reload_weights

    def lossy(weights_iterator: Any, **rest: Any) -> None:
        reload(weights_iterator=[x for x in weights_iterator if "layers.2.mlp.up_proj" not in x[0]], **rest)

    llm.llm_engine.model_executor.driver_worker.worker.model_runner.reload_weights = lossy
    tell("torn", refused(lambda: sync.update(torn.items(), 3)))
    tell("after a torn update", refused(lambda: sync.require(3)))
    llm.llm_engine.model_executor.driver_worker.worker.model_runner.reload_weights = reload
    sync.update(old.items(), 4)
    sync.require(4)
    tell("old again", rollout())
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=GENERATE, logprobs=0, ignore_eos=True, detokenize=False)
    for name, first in (("kept", 0), ("aborted", 3)):
        engine.add_request(name, {"prompt_token_ids": PROMPT[first:]}, params)
    for _ in range(3):
        engine.step()
    tell("in flight", refused(lambda: sync.update(new.items(), 5)))
    engine.abort_request(["aborted"])
    done = [output for _ in range(GENERATE) if engine.has_unfinished_requests() for output in engine.step()]
    (answer,) = [output.outputs[0] for output in done if output.finished]
    tell("kept", list(answer.token_ids))
    tell("kept logprobs", [e[t].logprob for e, t in zip(answer.logprobs, answer.token_ids, strict=True)])
    for step in range(3):
        tell(f"trained {step}", train_and_compare(llm, sync, trainer(folder), rollout, 6 + step))


_trainer: Any = None


def trainer(folder: Path) -> Any:
    """A strict Megatron model in vLLM's process."""
    global _trainer
    if _trainer is None:
        options = EngineOptions("megatron", folder, profile="strict-v1/fma32-seq", max_length=96)
        _trainer = open_adapter(options, lambda *_: None)
    return _trainer


def train_and_compare(llm: Any, sync: Any, adapter: Any, rollout: Callable[[], Any], version: int) -> dict[str, Any]:
    """One optimizer step, a sync, a rollout, and Megatron's logprobs of what was rolled out."""
    import torch

    from integration.megatron import plugin

    def logprobs(ids: list[int]) -> Any:
        width = len(ids) - 1
        mask = torch.ones(1, 1, width, width, dtype=torch.bool).triu(1)
        logits = adapter.model(torch.tensor([ids[:-1]]), torch.arange(width)[None], mask)
        return plugin.logprobs(adapter.model, logits, torch.tensor([ids[1:]]), vocabulary=adapter.config.vocab_size)[0]

    adapter.model.zero_grad()
    (-logprobs(PROMPT).mean()).backward()
    with torch.no_grad():
        for parameter in adapter.model.parameters():
            parameter -= 0.5 * parameter.grad
    weights = dict(to_hf(lambda name: [adapter.model.get_parameter(name).detach()], adapter.config))
    sync.update(weights.items(), version)
    sync.require(version)
    drawn = rollout()
    scored = logprobs(PROMPT + drawn["tokens"])[len(PROMPT) - 1 :].tolist()
    return {"rollout": drawn["logprobs"], "train": scored, "prompt": float(logprobs(PROMPT).mean())}


if __name__ == "__main__":
    main()
