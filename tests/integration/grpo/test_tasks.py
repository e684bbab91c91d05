from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.errors import InputError
from diffcheck.base.models import resolve_model
from integration.grpo.tasks import open_task

pytest.importorskip("torch")


def open_tiny(**options: Any) -> Any:
    folder, config = resolve_model("tiny-qwen3")
    return open_task("tiny", folder, config, 3, options)


def test_the_tiny_task_asks_the_same_at_the_same_step_and_pays_by_its_rule() -> None:
    task = open_tiny()
    prompts = task.prompts(5, 8)
    assert prompts == open_tiny().prompts(5, 8) != task.prompts(6, 8)
    assert sorted(prompt[-1] for prompt in prompts) == [4, 4, 5, 5, 6, 6, 7, 7]
    assert all(len(prompt) == task.longest_prompt == 8 and max(prompt) < 509 for prompt in prompts)
    key = prompts[0][-1]
    assert task.reward(prompts[0], [key, key + 4, key + 1, key + 2]) == 0.5
    assert task.reward(prompts[0], [key + 8]) == 1.0
    # What a policy that knows nothing gets.
    assert task.reward(prompts[0], list(range(100, 500))) == 0.25


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("golf", {}, "task 'golf' is unknown"),
        ("tiny", {"fill": 2}, "unexpected keyword argument 'fill'"),
        ("text", {}, "tokenizer.json"),
        ("jsonl", {"path": "x"}, "reward"),
    ],
)
def test_unknown_tasks_and_options_are_named(name: str, options: dict[str, Any], named: str) -> None:
    folder, config = resolve_model("tiny-qwen3")
    with pytest.raises(InputError, match=named):
        open_task(name, folder, config, 0, options)


def longest(record: dict[str, Any], text: str | None, tokens: list[int]) -> float:
    """A reward that tests name: the share of tokens that the record wants."""
    assert text is None
    return sum(token in record["wanted"] for token in tokens) / len(tokens)


def broken(*_: Any) -> float:
    return float("nan")


REWARD = "tests.integration.grpo.test_tasks:longest"


def open_jsonl(path: Path, lines: list[Any], reward: str = REWARD) -> Any:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    folder, config = resolve_model("tiny-qwen3")
    return open_task("jsonl", folder, config, 0, {"path": str(path), "reward": reward})


def test_prompts_from_a_file_come_once_an_epoch_and_keep_their_record(tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [5 + i, 9], "wanted": [i]} for i in range(5)]
    task = open_jsonl(tmp_path / "prompts.jsonl", lines)
    asked = [prompt for step in range(1, 6) for prompt in task.prompts(step, 2)]
    assert sorted(asked[:5]) == sorted(asked[5:]) == [(5 + i, 9) for i in range(5)] and asked[:5] != asked[5:]
    assert task.reward((7, 9), [2, 2, 3, 4]) == 0.5
    assert task.longest_prompt == 2 and task.stop_token_ids == ()


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], "no prompts in it"),
        (["{"], ":1: not valid JSON"),
        ([[1]], ":1: not a JSON object"),
        ([{"prompt_token_ids": [5]}, {"wanted": []}], ":2: needs prompt_token_ids"),
        ([{"prompt_token_ids": [509]}], ":1: prompt_token_ids are no ids below 509"),
        ([{"prompt_token_ids": [True]}], ":1: prompt_token_ids are no ids"),
        ([{"prompt_token_ids": []}], ":1: prompt_token_ids are no ids"),
        ([{"prompt_token_ids": [5]}, {"prompt_token_ids": [5]}], ":2: this prompt is there already"),
    ],
)
def test_bad_lines_are_named(lines: list[Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=named):
        open_jsonl(tmp_path / "prompts.jsonl", lines)


@pytest.mark.parametrize("reward", ["nothing", "no_such_module:f", "json:nothing", "json:__name__"])
def test_a_reward_that_cannot_be_imported_is_named(reward: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="reward"):
        open_jsonl(tmp_path / "prompts.jsonl", [{"prompt_token_ids": [5]}], reward)


def test_a_reward_that_fails_is_named(tmp_path: Path) -> None:
    task = open_jsonl(tmp_path / "prompts.jsonl", [{"prompt_token_ids": [5]}])
    with pytest.raises(InputError, match="longest: KeyError: 'wanted'"):
        task.reward((5,), [1])
    task = open_jsonl(tmp_path / "prompts.jsonl", [{"prompt_token_ids": [5]}], REWARD.replace("longest", "broken"))
    with pytest.raises(InputError, match="broken: returned nan"):
        task.reward((5,), [1])
