"""Weight updates in a live strict vLLM, told as JSON lines: run by `test_weight_sync` in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

PROMPT = list(range(20, 61))
GENERATE = 8


def main() -> None:
    import torch
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    from diffcheck.models import resolve_model
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


if __name__ == "__main__":
    main()
