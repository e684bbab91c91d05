"""Samples: token sequences to roll out, score and compare, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffcheck.base.documents import MIB, finite
from diffcheck.base.errors import InputError
from diffcheck.base.files import read_lines, write_text
from diffcheck.base.recorded import check_recorded

#: Bytes of the largest samples file that is read: of some million tokens.
_LIMIT = 512 * MIB
#: Fields that only our own traces hold.
_OURS = frozenset({"recorded_logprobs", "prompt_logprobs"})
#: Ways of sampling that no contract here has, and what each does to the distribution.
UNSUPPORTED_SAMPLING = {
    "min_p": "drops tokens below a share of the most likely one's probability",
    "typical_p": "drops tokens by their distance from the entropy",
    "epsilon_cutoff": "drops tokens below a probability",
    "eta_cutoff": "drops tokens below a probability that depends on the entropy",
    "top_a": "drops tokens below a share of the squared highest probability",
    "top_h": "drops tokens by entropy",
    "repetition_penalty": "scales the logits of tokens seen before",
    "encoder_repetition_penalty": "scales the logits of the prompt's tokens",
    "presence_penalty": "lowers the logits of tokens written before",
    "frequency_penalty": "lowers the logits of tokens by how often they were written",
    "no_repeat_ngram_size": "forbids tokens that would repeat an n-gram",
    "logit_bias": "adds to the logits of chosen tokens",
    "sequence_bias": "adds to the logits of chosen sequences",
    "bad_words": "forbids tokens",
    "bad_words_ids": "forbids tokens",
    "allowed_token_ids": "forbids all other tokens",
    "suppress_tokens": "forbids tokens",
    "begin_suppress_tokens": "forbids tokens at the start",
    "min_tokens": "forbids the end of a response before that many tokens",
    "min_length": "forbids the end of a sequence before that length",
    "min_new_tokens": "forbids the end of a response before that many tokens",
    "forced_bos_token_id": "forces a token",
    "forced_eos_token_id": "forces a token",
    "guided_decoding": "forbids tokens by a grammar",
    "structured_outputs": "forbids tokens by a grammar",
    "guidance_scale": "mixes two distributions",
    "logits_processors": "changes the logits by a program",
}


@dataclass(frozen=True)
class Sample:
    """One sequence. An empty response asks the rollout engine to generate one."""

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...] = ()
    #: Natural logarithms, one a response token, as another system recorded them.
    rollout_logprobs: tuple[float, ...] | None = None
    weight_version: int | None = None
    temperature: float | None = None
    #: Names the sample in every file and trace; without it the tokens do.
    id: str | int | None = None
    #: What another system recorded, while `rollout_logprobs` holds what an engine here computed. Not read from files.
    recorded_logprobs: tuple[float, ...] | None = None
    #: Natural logarithms of the prompt's tokens but its first, as an engine returned them. Not read from files.
    prompt_logprobs: tuple[float, ...] | None = None

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
            readable = ", ".join(sorted(known - _OURS))
            if (change := UNSUPPORTED_SAMPLING.get(unknown[0])) is not None:
                raise InputError(
                    f"{where}: {unknown[0]} is not supported: it {change}",
                    "sample with temperature, top_p and top_k alone, or leave it out where it had no effect",
                )
            raise InputError(f"{where}: unknown field {unknown[0]!r}", f"known fields: {readable}")
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
        others = {
            name: _floats(data.get(name), f"{where}: {name}") for name in ("recorded_logprobs", "prompt_logprobs")
        }
        version = data.get("weight_version")
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise InputError(f"{where}: weight_version {version!r} is not an integer", "omit it, or give an integer")
        temperature = _floats([data["temperature"]], f"{where}: temperature") if "temperature" in data else None
        if temperature and not 0 < temperature[0] < float("inf"):
            raise InputError(f"{where}: temperature {temperature[0]} is not positive and finite", "logprobs need T > 0")
        name = data.get("id")
        if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
            raise InputError(f"{where}: id {name!r} is neither text nor an integer", "omit it, or give one of these")
        return cls(prompt, response, logprobs, version, temperature[0] if temperature else None, name, **others)


def load_samples(path: Path) -> list[Sample]:
    """Read a JSON-lines file; blank lines are skipped.

    Raises:
        InputError: the file is missing or empty, a line is malformed, an id comes twice, or a recorded logprob is none
            (file and line number named).
    """
    if not path.is_file():
        raise InputError(f"{path}: no such samples file", "give an existing JSON-lines file with --samples")
    samples: list[Sample] = []
    seen: dict[str | int | None, int] = {}
    for number, data in read_lines(path, _LIMIT):
        where = f"{path}:{number}"
        if isinstance(data, dict) and (ours := sorted(_OURS & set(data))):
            raise InputError(f"{where}: field {ours[0]!r} is not read from a file", "take it out")
        sample = Sample.from_json(data, where)
        check_recorded(sample.rollout_logprobs, f"{where}: rollout_logprobs")
        if sample.id is not None and sample.id in seen:
            raise InputError(
                f"{where}: id {sample.id!r} is that of line {seen[sample.id]} too",
                "an id names one sample; leave ids out and samples are told apart by their tokens",
            )
        seen[sample.id] = number
        samples.append(sample)
    if not samples:
        raise InputError(f"{path}: no samples in it", "comparing nothing is never 'equal'; add at least one line")
    return samples


def save_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write JSON lines atomically.

    Raises:
        InputError: they cannot be written.
    """
    # What was recorded elsewhere stays in the file it came in; here the logprobs are the engine's own.
    rows = [{k: v for k, v in s.to_json().items() if k not in _OURS} for s in samples]
    write_text(path, "".join(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows))


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
    if any(not 0 <= x < 1 << 31 for x in value):
        raise InputError(f"{where} holds a number that is no token id", "token ids count from 0")
    return tuple(value)


def _floats(value: object, where: str) -> tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, list) and None in value:
        raise InputError(f"{where}[{value.index(None)}] is null", "give one number a token, or omit the field")
    if isinstance(value, list):
        value = [_number(x) for x in value]
    if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int | float) for x in value):
        raise InputError(f"{where} is not a list of numbers", "give numbers, or omit the field")
    if any(isinstance(x, int) and abs(x) > 10**300 for x in value):
        raise InputError(f"{where} holds a number that no float can", "logprobs are natural logarithms")
    return tuple(float(x) for x in value)


def _number(value: object) -> object:
    """A number of a trace, where what is no number has a name (`diffcheck.base.documents.finite`)."""
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value
