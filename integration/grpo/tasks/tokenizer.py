"""What a model folder says of its tokens: its tokenizer, the tokens that end a text, and those that stand for none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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

    @classmethod
    def of(cls, folder: Path) -> FolderTokenizer | None:
        """The tokenizer of a folder, None where it has none.

        Raises:
            InputError: it cannot be read.
        """
        return cls(folder) if (folder / "tokenizer.json").is_file() else None

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(int(token) for token in self._tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def ids(self) -> frozenset[int]:
        """Every id that stands for a token."""
        return frozenset(int(token) for token in self._tokenizer.get_vocab(with_added_tokens=True).values())

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant answers, by the folder's own chat template.

        Args:
            messages: objects with ``role`` and ``content``, as Hugging Face's chat templates take them.

        Raises:
            InputError: the folder has no template, or it refuses these messages.
        """
        template, special = _template(self._folder)
        from transformers import PreTrainedTokenizerFast

        renderer = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, chat_template=template, **special)
        try:
            text = renderer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # Jinja's errors, and whatever a template raises itself
            raise InputError(f"{self._folder}: its chat template: {error}", "mend messages, or the template") from None
        # The template writes the special tokens itself.
        return tuple(int(token) for token in self._tokenizer.encode(text, add_special_tokens=False).ids)


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Every token that ends a text: the eos_token_id of config.json and of generation_config.json (one or many), and
    the eos_token of tokenizer_config.json and special_tokens_map.json. None of them overrules another: engines that
    read only one of these files are why responses run on.

    Raises:
        InputError: a file is no JSON, or its field no token id.
    """
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        value = _read(folder / name).get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if type(token) is not int or token < 0:
                raise InputError(f"{folder / name}: eos_token_id = {value!r} is no token id", "give ids, 0 or above")
            found.append(token)
    tokenizer = FolderTokenizer.of(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        text = _text(_read(folder / name).get("eos_token"))
        if text is None or tokenizer is None:
            continue
        named = tokenizer.id_of(text)
        if named is None:
            raise InputError(f"{folder / name}: eos_token {text!r} is no token of tokenizer.json", "mend either file")
        found.append(named)
    return tuple(dict.fromkeys(found))


def tokens_without_text(folder: Path, vocabulary: int, stop: Sequence[int]) -> tuple[int, ...]:
    """Ids below ``vocabulary`` that the folder's tokenizer lacks and that do not stop a response: a model draws them,
    learns from them, and no text has them. None for a folder without tokenizer.

    Raises:
        InputError: the tokenizer cannot be read, or knows no id of the model.
    """
    tokenizer = FolderTokenizer.of(folder)
    if tokenizer is None:
        return ()
    known = tokenizer.ids()
    if not any(token < vocabulary for token in known):
        raise InputError(f"{folder / 'tokenizer.json'}: no id below {vocabulary}", "give the model its own tokenizer")
    known |= set(stop)
    return tuple(token for token in range(vocabulary) if token not in known)


def _template(folder: Path) -> tuple[str, dict[str, str]]:
    """The chat template, and the texts of the special tokens that it may write."""
    config = _read(folder / "tokenizer_config.json")
    path = folder / "chat_template.jinja"
    template: Any = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise InputError(
            f"{folder}: no chat template in chat_template.jinja or tokenizer_config.json",
            "add the model's own, or give prompt or prompt_token_ids in place of messages",
        )
    config = {**_read(folder / "special_tokens_map.json"), **config}
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return template, {name: text for name in names if (text := _text(config.get(name))) is not None}


def _text(token: Any) -> str | None:
    """A special token's text: a string, or an object with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}", "restore the file from the model's source") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: not a JSON object", "restore the file from the model's source")
    return found
