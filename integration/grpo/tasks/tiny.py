"""Answer with tokens of the class that the prompt's last token names: a rule that a random model learns in minutes.

Token ids fall into four classes, id modulo 4. A prompt is a few random tokens and a key; the reward is the share of
response tokens in the key's class. A policy that knows nothing gets 1/4, one that sees only which tokens pay on average
gets no more: the key must be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diffcheck.base.errors import InputError
from reference.models.config import ModelConfig

CLASSES = 4
#: Ids below are special tokens of the built-in models.
FIRST = 4


class Task:
    """See the module.

    Args:
        filler: random tokens before the key.
    """

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, folder: Path, config: ModelConfig, seed: int, filler: int = 7) -> None:
        if config.vocab_size < FIRST + 2 * CLASSES:
            raise InputError(f"task tiny: a vocabulary of {config.vocab_size} is too small", "use another task")
        self._vocabulary, self._seed, self._filler = config.vocab_size, seed, filler
        self.longest_prompt = filler + 1

    def prompts(self, step: int, count: int) -> list[tuple[int, ...]]:
        rng = np.random.default_rng((self._seed, step))
        fillers = rng.integers(FIRST + CLASSES, self._vocabulary, (count, self._filler))
        # Every class equally often, in random order, so that steps are comparable.
        keys = FIRST + rng.permutation(np.arange(count) % CLASSES)
        return [(*map(int, filler), int(key)) for filler, key in zip(fillers, keys, strict=True)]

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        wanted = prompt[-1] % CLASSES
        return sum(token % CLASSES == wanted for token in response) / len(response)

    def loss_mask(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        return None
