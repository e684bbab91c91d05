"""Your own prompts and reward: JSON lines, and an importable function.

A line is an object with ``prompt`` (text), ``prompt_token_ids`` or ``messages`` (turns of a conversation, which the
model's chat template puts into words; all of them are prompt, so that no earlier turn is learned from), and whatever
else the reward needs. The reward is named ``module:function`` and called as ``function(record, text, tokens)``: the
line, the response as text (None for a model without tokenizer) and as token ids. It returns a finite number, the same
for the same arguments.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffcheck.base.errors import InputError
from integration.grpo.tasks.tokenizer import FolderTokenizer, end_tokens
from reference.models.config import ModelConfig


class Task:
    """See the module.

    Args:
        path: of the JSON lines. reward: ``module:function``, importable from the working folder too.
        loss_mask: likewise, called with the same arguments: a list of 0 and 1, one a token of the response; tokens with
            0 (quoted turns, a tool's output) are scored and compared, and not learned from.

    Raises:
        InputError: a file, a line (by number) or the function is unusable.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, seed: int, *, path: str, reward: str, loss_mask: str = ""
    ) -> None:
        self._seed = seed
        self._tokenizer = FolderTokenizer.of(folder)
        self.stop_token_ids = end_tokens(folder)
        self._name, self._function = reward, _imported(reward, "reward")
        self._mask_name, self._mask = loss_mask, _imported(loss_mask, "loss_mask") if loss_mask else None
        self._records: dict[tuple[int, ...], dict[str, Any]] = {}
        for number, record in _lines(Path(path)):
            where = f"{path}:{number}"
            tokens = self._prompt(record, where, config.vocab_size)
            if tokens in self._records:
                raise InputError(f"{where}: this prompt is there already", "give each prompt once")
            self._records[tokens] = record
        if not self._records:
            raise InputError(f"{path}: no prompts in it", "add at least one line")
        self._tokens = list(self._records)
        self.longest_prompt = max(map(len, self._tokens))

    def prompts(self, step: int, count: int) -> list[tuple[int, ...]]:
        """Every prompt once, in random order, then again in another."""
        total, chosen = len(self._tokens), []
        for number in range((step - 1) * count, step * count):
            epoch, place = divmod(number, total)
            order = np.random.default_rng((self._seed, epoch)).permutation(total)
            chosen.append(self._tokens[int(order[place])])
        return chosen

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        """Raises:
        InputError: the function failed, or returned no finite number.
        """
        value = float(self._asked(self._name, lambda *given: float(self._function(*given)), prompt, response))
        if not math.isfinite(value):
            raise InputError(f"{self._name}: returned {value}", "return a finite number; then resume")
        return value

    def loss_mask(self, prompt: Sequence[int], response: Sequence[int]) -> list[int] | None:
        """Raises:
        InputError: the function failed, or returned no 0 or 1 for each token.
        """
        if self._mask is None:
            return None
        mask = self._asked(self._mask_name, self._mask, prompt, response)
        if not isinstance(mask, list | tuple) or len(mask) != len(response) or any(part not in (0, 1) for part in mask):
            raise InputError(
                f"{self._mask_name}: returned {str(mask)[:60]} for {len(response)} tokens",
                "return a list of 0 and 1, one a token; then resume",
            )
        return [int(part) for part in mask]

    def _asked(self, name: str, function: Callable[..., Any], prompt: Sequence[int], response: Sequence[int]) -> Any:
        """What a function of the user's says of a response."""
        tokens = list(response)
        text = self._tokenizer.decode(tokens) if self._tokenizer else None
        try:
            return function(self._records[tuple(prompt)], text, tokens)
        except Exception as error:
            raise InputError(f"{name}: {type(error).__name__}: {error}", "mend the function; then resume") from error

    def _prompt(self, record: dict[str, Any], where: str, vocabulary: int) -> tuple[int, ...]:
        tokens: Any = record.get("prompt_token_ids")
        given = [name for name in ("prompt", "prompt_token_ids", "messages") if record.get(name) is not None]
        if len(given) > 1:
            raise InputError(f"{where}: {' and '.join(given)} at once", "give one of them")
        if tokens is None:
            text, messages = record.get("prompt"), record.get("messages")
            if self._tokenizer is None or (not isinstance(text, str) and messages is None):
                raise InputError(
                    f"{where}: needs prompt_token_ids, or prompt or messages and a model with a tokenizer", "add one"
                )
            if messages is not None:
                tokens = self._tokenizer.chat(_messages(messages, where))
            else:
                tokens = self._tokenizer.encode(str(text))
        if not tokens or not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
            raise InputError(f"{where}: prompt_token_ids are no ids below {vocabulary}, or none", "give token ids")
        return tuple(tokens)


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: messages is no list of turns", 'for example [{"role": "user", "content": "Hi"}]')
    for place, turn in enumerate(messages):
        if not (isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn):
            raise InputError(f"{where}: messages[{place}] lacks role or content", "give each turn both")
    if messages[-1]["role"] == "assistant":
        raise InputError(f"{where}: the last of messages is the assistant's", "end with what it is to answer")
    return messages


def _imported(name: str, option: str) -> Callable[..., Any]:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise InputError(f"{option} {name!r} is not module:function", "for example my_rewards:length")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{option} {name}: {error}", "name a function that can be imported") from None
    if not callable(function):
        raise InputError(f"{option} {name} is not a function", "name a function that can be imported")
    return function  # type: ignore[no-any-return]


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}", "give an existing JSON-lines file") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}:{number}: not valid JSON: {error.msg}", "one JSON object a line") from None
            if not isinstance(record, dict):
                raise InputError(f"{path}:{number}: not a JSON object", "one JSON object a line")
            found.append((number, record))
    return found
