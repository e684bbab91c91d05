"""vLLM's sampler with the specification's temperature, masks, log-sum-exp and logprobs. The draws stay vLLM's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from integration.arrays import to_array
from integration.operators import StrictOperators
from integration.vllm.state import current
from reference.operators.logsumexp import LogsumexpResult

Tensor = Any
_GREEDY = 1e-5


class ProcessedLogits(torch.nn.Module):  # type: ignore[misc]
    """Masked logits [rows, vocabulary]: a module, so that what the log-softmax is taken of can be observed."""

    def __init__(self, get: Callable[[], StrictOperators]) -> None:
        super().__init__()
        self._get = get

    def forward(self, logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        rows, vocabulary = logits.shape
        k = [vocabulary] * rows if top_k is None else top_k.tolist()
        p = [1.0] * rows if top_p is None else top_p.tolist()
        limits = [(None if x >= vocabulary else int(x), y) for x, y in zip(k, p, strict=True)]
        return by_group(logits, limits, lambda part, limit: self._get().processed_logits(part, 1.0, *limit))


class LogSumExp(torch.nn.Module):  # type: ignore[misc]
    """Log-sum-exp [rows, 1] of processed logits."""

    def __init__(self, get: Callable[[], StrictOperators]) -> None:
        super().__init__()
        self._get = get
        self.result: LogsumexpResult | None = None

    def forward(self, logits: Tensor) -> Tensor:
        self.result = self._get().logsumexp(logits)
        return torch.from_numpy(self.result.value)[:, None]


class StrictTopKTopPSampler(TopKTopPSampler):  # type: ignore[misc]
    """Masks by the specification, then vLLM's draw."""

    def __init__(self, mode: str, get: Callable[[], StrictOperators], logprobs: Callable[[Tensor], Tensor]) -> None:
        super().__init__(mode)
        self.processed_logits = ProcessedLogits(get)
        self._logprobs = logprobs

    def forward_cpu(
        self, logits: Tensor, generators: dict[int, Any], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.processed_logits(logits, k, p)
        drawn, _ = super().forward_cpu(logits, generators, None, None)
        if self.logprobs_mode == "processed_logprobs":
            return drawn, self._logprobs(logits)
        return drawn, logits if self.logprobs_mode == "processed_logits" else None


class StrictSampler(Sampler):  # type: ignore[misc]
    """Takes the place of vLLM's sampler."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        super().__init__(logprobs_mode, use_fp64_gumbel)
        if use_fp64_gumbel:
            raise TypeError("draws in float64 have no strict path")
        self._get = current
        self.topk_topp_sampler = StrictTopKTopPSampler(
            logprobs_mode, self._get, lambda logits: self.compute_logprobs(logits)
        )
        self.logsumexp = LogSumExp(self._get)

    def apply_temperature(self, logits: Tensor, temp: Tensor, all_random: bool) -> Tensor:
        """Logits divided by each row's temperature; a greedy row keeps its logits."""
        own = self._get()
        chosen = [1.0 if t < _GREEDY else t for t in temp.tolist()]
        return by_group(logits, chosen, lambda part, t: own.processed_logits(part, t))

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Log-probability of every token [rows, vocabulary]."""
        logits = logits.float()
        value, result = self.logsumexp(logits), self.logsumexp.result
        assert result is not None
        # What left the module is what counts: somebody may have changed it on the way.
        return self._get().all_logprobs(logits, result._replace(value=np.ascontiguousarray(to_array(value)[:, 0])))


def by_group(logits: Tensor, keys: list[Any], function: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """``function(rows, key)`` of all rows that share a key, put back in order."""
    distinct = list(dict.fromkeys(keys))
    if len(distinct) == 1:
        return function(logits, distinct[0])
    result = torch.empty_like(logits)
    for key in distinct:
        rows = torch.tensor([i for i, other in enumerate(keys) if other == key])
        result[rows] = function(logits[rows], key)
    return result
