"""Real text for a trained model: name words that begin with a letter, paid by a rule.

The reward is the share of the response's words that begin with the letter of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from integration.grpo.tasks.tokenizer import FolderTokenizer, end_tokens
from reference.models.config import ModelConfig

LETTERS = "abcdefghijklmnoprstuvw"
_PROMPTS = (
    "Here is a list of words that begin with the letter {}:",
    "My favourite words all start with the letter {}. They are:",
    "Question: Which words begin with {}? Answer:",
)


class Task:
    """See the module; for models with a tokenizer, such as smollm2-135m.

    Args:
        preamble: what every prompt begins with: a prefix that they share.
    """

    def __init__(self, folder: Path, config: ModelConfig, seed: int, preamble: str = "") -> None:
        self._tokenizer, self._seed = FolderTokenizer(folder), seed
        self.stop_token_ids = end_tokens(folder)
        self._asked = [(letter, preamble + text.format(letter)) for text in _PROMPTS for letter in LETTERS]
        self._tokens = [self._tokenizer.encode(text) for _, text in self._asked]
        self._letter = {tokens: letter for tokens, (letter, _) in zip(self._tokens, self._asked, strict=True)}
        self.longest_prompt = max(map(len, self._tokens))

    def prompts(self, step: int, count: int) -> list[tuple[int, ...]]:
        chosen = np.random.default_rng((self._seed, step)).permutation(count) % len(self._tokens)
        first = (step - 1) * count
        return [self._tokens[(first + int(i)) % len(self._tokens)] for i in chosen]

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        words = re.findall(r"[a-z]+", self._tokenizer.decode(list(response)).lower())
        letter = self._letter[tuple(prompt)]
        return sum(word.startswith(letter) for word in words) / len(words) if words else 0.0

    def loss_mask(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        return None
