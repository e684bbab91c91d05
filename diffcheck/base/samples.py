"""Samples: token sequences to roll out, score and compare, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError


@dataclass(frozen=True)
class Sample:
    """One sequence. An empty response asks the rollout engine to generate one."""

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...] = ()
    #: Natural logarithms, one a response token, as another system recorded them.
    rollout_logprobs: tuple[float, ...] | None = None
    weight_version: int | None = None
    temperature: float | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.response_token_ids

    @property
    def forward_length(self) -> int:
        """Positions that are fed forward: all but the last token, which nothing follows."""
        return len(self.token_ids) - 1

    @property
    def response_positions(self) -> range:
        """Positions whose logits predict a response token."""
        return range(len(self.prompt_token_ids) - 1, self.forward_length)

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v is not None}

    @classmethod
    def from_json(cls, data: object, where: str = "sample") -> Sample:
        """Build from a parsed JSON object; ``where`` names it in errors.

        Raises:
            InputError: not an object, an unknown or missing field, or a value of the wrong type.
        """
        remedy = 'a sample is {"prompt_token_ids": [1, 5, 9], "response_token_ids": [7, 2]}'
        if not isinstance(data, dict):
            raise InputError(f"{where}: expected a JSON object, found {type(data).__name__}", remedy)
        known = set(cls.__dataclass_fields__)
        if unknown := sorted(set(data) - known):
            raise InputError(f"{where}: unknown field {unknown[0]!r}", f"known fields: {', '.join(sorted(known))}")
        if "prompt_token_ids" not in data:
            raise InputError(f"{where}: field 'prompt_token_ids' is missing", remedy)
        prompt = _ids(data["prompt_token_ids"], f"{where}: prompt_token_ids")
        if not prompt:
            raise InputError(f"{where}: prompt_token_ids is empty", "a prompt has at least one token")
        response = _ids(data.get("response_token_ids", []), f"{where}: response_token_ids")
        logprobs = _floats(data.get("rollout_logprobs"), f"{where}: rollout_logprobs")
        if logprobs is not None and len(logprobs) != len(response):
            raise InputError(
                f"{where}: {len(logprobs)} rollout_logprobs for {len(response)} response tokens",
                "give one logprob a response token, or none",
            )
        version = data.get("weight_version")
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise InputError(f"{where}: weight_version {version!r} is not an integer", "omit it, or give an integer")
        temperature = _floats([data["temperature"]], f"{where}: temperature") if "temperature" in data else None
        if temperature and temperature[0] <= 0:
            raise InputError(f"{where}: temperature {temperature[0]} is not positive", "logprobs need T > 0")
        return cls(prompt, response, logprobs, version, temperature[0] if temperature else None)


def load_samples(path: Path) -> list[Sample]:
    """Read a JSON-lines file; blank lines are skipped.

    Raises:
        InputError: the file is missing or empty, or a line is malformed (file and line number named).
    """
    if not path.is_file():
        raise InputError(f"{path}: no such samples file", "give an existing JSON-lines file with --samples")
    samples = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not valid JSON: {error.msg}", "one JSON object a line") from None
        samples.append(Sample.from_json(data, f"{path}:{number}"))
    if not samples:
        raise InputError(f"{path}: no samples in it", "comparing nothing is never 'equal'; add at least one line")
    return samples


def save_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write JSON lines atomically."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text("".join(json.dumps(s.to_json()) + "\n" for s in samples))
    temporary.replace(path)


def check_samples(samples: Sequence[Sample], vocab_size: int, max_length: int, *, scored: bool) -> None:
    """Check samples against a model.

    Args:
        scored: responses must be present already (no engine will generate them).

    Raises:
        InputError: no samples, a token id outside the vocabulary, a sequence too long, or a response of length 0.
    """
    if not samples:
        raise InputError("no samples to compare", "give at least one")
    for i, sample in enumerate(samples):
        for field in ("prompt_token_ids", "response_token_ids"):
            for j, token in enumerate(getattr(sample, field)):
                if not 0 <= token < vocab_size:
                    raise InputError(
                        f"sample {i}: {field}[{j}] = {token} is outside the vocabulary of {vocab_size}",
                        "tokenise with this model's own tokenizer",
                    )
        if len(sample.token_ids) > max_length:
            raise InputError(
                f"sample {i}: {len(sample.token_ids)} tokens exceed the limit of {max_length}", "shorten the sample"
            )
        if scored and not sample.response_token_ids:
            raise InputError(
                f"sample {i}: response of length 0, so there is no logprob to compare",
                "give response_token_ids, or let a rollout engine generate them",
            )


def _ids(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
        raise InputError(f"{where} is not a list of integers", "token ids are integers")
    return tuple(value)


def _floats(value: object, where: str) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int | float) for x in value):
        raise InputError(f"{where} is not a list of numbers", "give numbers, or omit the field")
    return tuple(float(x) for x in value)
