"""The tokenizer of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError


class FolderTokenizer:
    """Text to token ids and back, with the folder's tokenizer.json.

    Raises:
        InputError: the folder has none, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            from tokenizers import Tokenizer

            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise InputError(f"{path}: {error}", "this task needs a model with a tokenizer.json") from None
        self._folder = folder

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(int(token) for token in self._tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that the model's config.json says end a text."""
        found = json.loads((self._folder / "config.json").read_text()).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        return tuple(int(token) for token in ids if token is not None)
