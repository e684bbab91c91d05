"""The rollout engine's side: a real vLLM that takes weights, draws responses and can be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from diffcheck.base.errors import EngineError
from diffcheck.base.progress import silent
from diffcheck.capture.plan import CapturePlan
from diffcheck.capture.vllm import Adapter
from integration.grpo.config import GrpoConfig
from integration.grpo.workers.actors import engine_options, main
from integration.grpo.workers.counts import add_operators
from integration.grpo.workers.weights import read_weights
from integration.vllm import draws, following
from integration.vllm.following import graphs_run
from integration.vllm.in_place import InPlaceSync
from integration.vllm.sync import WeightSync, WeightSyncError

T = TypeVar("T")
#: Tokens of a forward that graphs are captured for: a third of vLLM's own list, because a run starts more than once.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


class Rollout:
    """A live vLLM.

    Args:
        options: ``config`` (a `GrpoConfig`), ``folder`` of the model, ``max_length`` of a sequence, ``stop`` tokens and
            ``hidden`` ones, which are never drawn.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._config = config = GrpoConfig(**options["config"])
        self._stop, hidden = list(options["stop"]), frozenset(options["hidden"])
        self._adapter = Adapter(
            engine_options(
                "vllm",
                config,
                options,
                max_sequences=config.max_sequences,
                extra=_switches(config, int(options["max_length"])),
            ),
            silent,
        )
        vocabulary = range(self._adapter.config.vocab_size)
        self._allowed = [token for token in vocabulary if token not in hidden] if hidden else None
        self._files = WeightSync(self._adapter.llm, self._adapter.config)
        self._memory = InPlaceSync(self._adapter.llm, self._adapter.config)
        #: What the live weights came by.
        self._sync: WeightSync | InPlaceSync = self._files
        self._rpc(following.follow)
        if config.followed is not None:
            self._rpc(draws.install)
        self._total: Counter[str] = Counter()
        self._wrapped: Counter[str] = Counter()
        self._operators: dict[str, dict[str, Any]] = {}
        self._strict: dict[str, Any] = {}

    def sync(self, path: str, version: int, digests: dict[str, str]) -> None:
        """Take the weights of the file ``path`` as ``version``.

        Raises:
            InputError: the file is torn, or not of these digests.
            EngineError: vLLM does not hold them afterwards.
        """
        weights = read_weights(Path(path), digests)
        self._sync = self._files
        self._checked(lambda: self._files.update(weights.items(), version))

    def sync_shared(self, place: dict[str, Any], version: int, digests: dict[str, str]) -> None:
        """Take the weights that the trainer put into shared memory as ``version``, in place.

        Raises:
            EngineError: the memory cannot be mapped, or vLLM does not hold them afterwards.
        """
        self._sync = self._memory
        self._checked(lambda: self._memory.update(place, version, digests))

    def generate(self, requests: list[dict[str, Any]], version: int, digests: dict[str, str]) -> dict[str, Any]:
        """Draw a response for each request.

        Args:
            requests: ``id``, ``prompt`` (token ids) and ``seed``.
            version, digests: of the weights to draw with.

        Returns:
            ``records``: one a request, in order: ``id``, ``tokens``, ``logprobs`` (exact float32 values; of the
            distribution that was drawn from), ``finish_reason``, ``version``.

        Raises:
            EngineError: vLLM holds other weights, its strict path is not in place, or it failed.
        """
        self._checked(lambda: self._sync.require(version, digests))
        engine = self._adapter.llm.llm_engine
        # What is drawn must not depend on what was drawn before.
        engine.reset_prefix_cache()
        self._checked(lambda: self._rpc(following.begin))
        for request in requests:
            prompt = {"prompt_token_ids": request["prompt"]}
            engine.add_request(request["id"], prompt, self._sampling(int(request["seed"])))
        done: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step() if output.finished}
        self._count(self._checked(lambda: self._rpc(following.finish))[0])
        return {"records": [_record(request["id"], done[request["id"]], version) for request in requests]}

    def capture(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Run a capture plan with the weights that are live."""
        return self._adapter.capture(CapturePlan.from_json(plan), silent).to_json()

    def evidence(self) -> dict[str, Any]:
        """What ran in all rollouts of this engine so far."""
        return {
            "engine": f"vLLM {self._adapter.version}",
            "forwards": self._total["forwards"],
            "scheduler": {name: count for name, count in self._total.items() if not name.startswith("graph_")},
            "graphs": {"modes": graphs_run(self._total), "wrapped": dict(self._wrapped)},
            "weights": "in place, out of shared memory" if self._sync is self._memory else "reloaded from a file",
            "kv_paging": self._kv_paging(),
            "operators": self._operators,
            "engine_facts": self._rpc(following.describe)[0],
            "fallbacks": 0,
            **self._strict,
        }

    def close(self) -> None:
        self._adapter.close()

    def _kv_paging(self) -> dict[str, Any]:
        facts = self._rpc(following.describe)[0]
        return {name: facts[name] for name in ("block_size", "kv_cache_blocks", "kv_cache_shape", "prefix_caching")}

    def _sampling(self, seed: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=self._config.temperature,
            top_k=self._config.top_k,
            top_p=self._config.top_p,
            max_tokens=self._config.max_tokens,
            # Of its own, so that its draws do not depend on what else is in flight; a strict engine's not on the device
            # either.
            **({"seed": seed} if self._config.followed is None else {"extra_args": {draws.SEED: seed}}),
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=self._stop,
            allowed_token_ids=self._allowed,
        )

    def _count(self, facts: dict[str, Any]) -> None:
        scheduler = facts.pop("scheduler")
        most = max(self._total["requests_at_once"], scheduler.pop("requests_at_once"))
        self._total.update(scheduler)
        self._total["requests_at_once"] = most
        # As the wrappers of vLLM's graphs say it; replays since this rollout began, captures since the start.
        for name, count in facts.pop("graphs", {}).items():
            self._wrapped[name] = count + (self._wrapped[name] if name.startswith("replayed") else 0)
        add_operators(self._operators, facts.pop("operators", {}))
        self._strict = facts

    def _rpc(self, function: Callable[[Any], Any]) -> list[Any]:
        answers: list[Any] = self._adapter.llm.collective_rpc(function)
        return answers

    def _checked(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except WeightSyncError as error:
            raise EngineError(f"weights: {error}", "resume the run: it sends them again") from None
        except RuntimeError as error:
            raise EngineError(f"{error}", "see rlk-diff doctor; nothing was drawn natively") from None


def _switches(config: GrpoConfig, max_length: int) -> dict[str, Any]:
    """How vLLM is started; see `diffcheck.capture.vllm.engine.EXTRA`."""
    # vLLM on a CPU cannot draw with a generator of the request's own while its prompt is prefilled in chunks.
    unchunked = max(2048, config.max_sequences * max_length) if config.engine == "cpu" else None
    return {
        # The distribution that is drawn from, which the trainer recomputes.
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "block_size": 32 if config.engine == "cpu" else 16,
        "max_num_batched_tokens": config.max_batched_tokens or unchunked,
        "num_gpu_blocks_override": config.cache_blocks or None,
        "gpu_memory_utilization": config.gpu_memory or None,
        "graphs": config.engine == "gpu" and not config.eager,
        "graph_sizes": [size for size in _SIZES if size <= 2 * config.max_sequences],
    }


def _record(name: str, output: Any, version: int) -> dict[str, Any]:
    (completion,) = output.outputs
    tokens = [int(token) for token in completion.token_ids]
    entries = completion.logprobs or []
    logprobs = [float(entry[token].logprob) for entry, token in zip(entries, tokens, strict=False)]
    reason = str(completion.finish_reason)
    return {"id": name, "tokens": tokens, "logprobs": logprobs, "finish_reason": reason, "version": version}


if __name__ == "__main__":
    main(Rollout)
