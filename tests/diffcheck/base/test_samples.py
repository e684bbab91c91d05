"""Samples: what is accepted, and what each malformed line is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffcheck.base.errors import InputError
from diffcheck.base.samples import Sample, check_samples, load_samples, save_samples

GOOD = {"prompt_token_ids": [1, 2], "response_token_ids": [3]}


def test_samples_survive_a_round_trip(tmp_path: Path) -> None:
    samples = [Sample((1, 2), (3, 4), (-0.5, -1.25), 7, 0.7), Sample((5,))]
    save_samples(tmp_path / "s.jsonl", samples)
    assert load_samples(tmp_path / "s.jsonl") == samples
    assert [p.name for p in tmp_path.iterdir()] == ["s.jsonl"]


def test_rows_of_a_sample() -> None:
    """The last token is never fed; the logits at the last prompt token predict the first response token."""
    sample = Sample((1, 2, 3), (4, 5))
    assert (sample.forward_length, list(sample.response_positions)) == (4, [2, 3])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ("{}", "'prompt_token_ids' is missing"),
        ('{"prompt_token_ids": []}', "prompt_token_ids is empty"),
        ('{"prompt_token_ids": [1.5]}', "not a list of integers"),
        ('{"prompt_token_ids": [true]}', "not a list of integers"),
        ('{"prompt_token_ids": "1 2"}', "not a list of integers"),
        ('{"prompt_token_ids": [1], "prompt": "x"}', "unknown field 'prompt'"),
        ('{"prompt_token_ids": [1], "response_token_ids": [2], "rollout_logprobs": []}', "0 rollout_logprobs for 1"),
        ('{"prompt_token_ids": [1], "rollout_logprobs": "x"}', "not a list of numbers"),
        ('{"prompt_token_ids": [1], "temperature": 0}', "not positive"),
        ('{"prompt_token_ids": [1], "weight_version": 1.5}', "not an integer"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(InputError) as caught:
        load_samples(path)
    assert f"{path}:3" in caught.value.cause and words in caught.value.cause and caught.value.remedy


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such samples file"):
        load_samples(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InputError, match="no samples"):
        load_samples(tmp_path / "empty")


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (Sample((1, 11), (2,)), "prompt_token_ids[1] = 11"),
        (Sample((1,), (2, -1)), "response_token_ids[1] = -1"),
        (Sample((1,), ()), "response of length 0"),
        (Sample((1,) * 9, (2,)), "10 tokens exceed the limit of 8"),
    ],
)
def test_samples_must_fit_the_model(sample: Sample, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_samples([Sample((1,), (2,)), sample], vocab_size=11, max_length=8, scored=True)
    assert "sample 1" in caught.value.cause and words in caught.value.cause


def test_a_response_may_be_left_to_a_rollout_engine() -> None:
    check_samples([Sample((1,))], vocab_size=11, max_length=8, scored=False)
    with pytest.raises(InputError, match="no samples"):
        check_samples([], vocab_size=11, max_length=8, scored=False)
