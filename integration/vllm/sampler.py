"""vLLM's sampler with the specification's temperature, masks, log-sum-exp and logprobs. The draws stay vLLM's own,
except for requests with a seed of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from integration.backends import Logsumexp, Operators
from integration.vllm.state import current

Tensor = Any
_GREEDY = 1e-5


class ProcessedLogits(torch.nn.Module):  # type: ignore[misc]
    """Masked logits [rows, vocabulary]: a module, so that what the log-softmax is taken of can be observed."""

    def __init__(self, get: Callable[[], Operators]) -> None:
        super().__init__()
        self._get = get

    def forward(self, logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        return self._get().processed_logits(logits, 1.0, top_k, top_p)


class LogSumExp(torch.nn.Module):  # type: ignore[misc]
    """Log-sum-exp [rows, 1] of processed logits."""

    def __init__(self, get: Callable[[], Operators]) -> None:
        super().__init__()
        self._get = get
        self.result: Logsumexp | None = None

    def forward(self, logits: Tensor) -> Tensor:
        self.result = self._get().logsumexp(logits)
        return self.result.value[:, None]


class StrictTopKTopPSampler(TopKTopPSampler):  # type: ignore[misc]
    """Masks by the specification, then vLLM's draw."""

    def __init__(self, mode: str, get: Callable[[], Operators], logprobs: Callable[[Tensor], Tensor]) -> None:
        super().__init__(mode)
        self.processed_logits = ProcessedLogits(get)
        self._logprobs = logprobs
        # vLLM chose a method by device when it made this module; whatever it was, the masks are ours
        on_cpu = getattr(self, "forward").__name__ == "forward_cpu"  # noqa: B009 - vLLM sets it on the instance
        self._draw = super().forward_cpu if on_cpu else super().forward_native
        #: Draws by the requests' own seeds, or None where they have none; see `integration.vllm.draws`.
        self.drawn: Callable[[Tensor], Tensor | None] = lambda _logits: None
        self.forward: Any = self._masked

    def _masked(
        self, logits: Tensor, generators: dict[int, Any], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.processed_logits(logits, k, p)
        drawn = self.drawn(logits)
        if drawn is None:
            drawn, _ = self._draw(logits, generators, None, None)
        if self.logprobs_mode == "processed_logprobs":
            return drawn, self._logprobs(logits)
        return drawn, logits if self.logprobs_mode == "processed_logits" else None


class StrictSampler(Sampler):  # type: ignore[misc]
    """Takes the place of vLLM's sampler."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        if use_fp64_gumbel:
            raise TypeError("draws in float64 have no strict path")
        super().__init__(logprobs_mode)
        self._get = current
        self.topk_topp_sampler = StrictTopKTopPSampler(
            logprobs_mode, self._get, lambda logits: self.compute_logprobs(logits)
        )
        self.logsumexp = LogSumExp(self._get)

    def apply_temperature(self, logits: Tensor, temp: Tensor, all_random: bool) -> Tensor:
        """Logits divided by each row's temperature; a greedy row keeps its logits."""
        return self._get().processed_logits(logits, torch.where(temp < _GREEDY, 1.0, temp))

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Log-probability of every token [rows, vocabulary]."""
        logits = logits.float()
        value, result = self.logsumexp(logits), self.logsumexp.result
        assert result is not None
        # What left the module is what counts: somebody may have changed it on the way.
        return self._get().all_logprobs(logits, result._replace(value=value[:, 0].contiguous()))
