from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.errors import InputError
from diffcheck.base.models import resolve_model
from integration.grpo.tasks import open_task
from integration.grpo.tasks.tokenizer import FolderTokenizer, end_tokens, tokens_without_text

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


def first_half(record: dict[str, Any], text: str | None, tokens: list[int]) -> list[int]:
    """A loss mask that tests name."""
    return [int(i < len(tokens) // 2) for i in range(len(tokens))]


def too_short(*_: Any) -> list[int]:
    return [1]


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
    assert task.longest_prompt == 2 and task.stop_token_ids == (2,), "the end of a text, as config.json says"


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], "no prompts in it"),
        (["{"], ":1: not valid JSON"),
        ([[1]], ":1: not a JSON object"),
        ([{"prompt_token_ids": [5]}, {"wanted": []}], ":2: needs prompt_token_ids"),
        ([{"prompt": "w5", "prompt_token_ids": [5]}], ":1: prompt and prompt_token_ids at once"),
        (
            [{"messages": [{"role": "user", "content": "w5"}]}],
            ":1: needs prompt_token_ids, or prompt or messages",
        ),
        ([{"prompt_token_ids": [509]}], ":1: prompt_token_ids are no ids below 509"),
        ([{"prompt_token_ids": [True]}], ":1: prompt_token_ids are no ids"),
        ([{"prompt_token_ids": []}], ":1: prompt_token_ids are no ids"),
        ([{"prompt_token_ids": [5]}, {"prompt_token_ids": [5]}], ":2: this prompt is there already"),
    ],
)
def test_bad_lines_are_named(lines: list[Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=named):
        open_jsonl(tmp_path / "prompts.jsonl", lines)


def test_a_loss_mask_says_which_tokens_are_learned_from(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [5]}\n')
    folder, config = resolve_model("tiny-qwen3")

    def masked(name: str) -> Any:
        options = {"path": str(path), "reward": REWARD, "loss_mask": f"tests.integration.grpo.test_tasks:{name}"}
        return open_task("jsonl", folder, config, 0, options)

    assert masked("first_half").loss_mask((5,), [7, 8, 9, 10]) == [1, 1, 0, 0]
    assert (
        open_jsonl(path, [{"prompt_token_ids": [5]}]).loss_mask((5,), [7]) is open_tiny().loss_mask((5,), [7]) is None
    )
    with pytest.raises(InputError, match=r"too_short: returned \[1\] for 2 tokens"):
        masked("too_short").loss_mask((5,), [7, 8])
    with pytest.raises(InputError, match="broken: returned nan for 1 tokens"):
        masked("broken").loss_mask((5,), [7])
    with pytest.raises(InputError, match=r"loss_mask tests.*absent"):
        masked("absent")


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


#: 12 tokens of a tokenizer, of a model with 20 ids.
WORDS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "w6", "w7", "w8", "w9", "w10", "w11"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} <|{{ m.role }}|> {{ m.content }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %} <|assistant|>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, as far as its tokens go."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (2,)),
        ({"config.json": {}}, ()),
        ({"config.json": {"eos_token_id": None}, "generation_config.json": {"eos_token_id": 7}}, (7,)),
        ({"generation_config.json": {"eos_token_id": [7, 2, 9]}}, (2, 7, 9)),
        ({"tokenizer_config.json": {"eos_token": "<|end|>"}}, (2, 5)),
        ({"special_tokens_map.json": {"eos_token": {"content": "<|end|>", "lstrip": False}}}, (2, 5)),
        ({"generation_config.json": {"eos_token_id": 0}, "tokenizer_config.json": {"eos_token": None}}, (2, 0)),
    ],
)
def test_every_file_that_names_an_end_is_heard(files: dict[str, Any], expected: tuple[int, ...], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert end_tokens(folder) == expected


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("generation_config.json", "{", "generation_config.json"),
        ("generation_config.json", "[]", "generation_config.json: not a JSON object"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id = '</s>' is no token id"),
        ("config.json", '{"eos_token_id": [2, true]}', "is no token id"),
        ("tokenizer_config.json", '{"eos_token": "<eot>"}', "eos_token '<eot>' is no token of tokenizer.json"),
    ],
)
def test_an_end_that_is_none_is_named(name: str, text: str, named: str, folder: Path) -> None:
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=named):
        end_tokens(folder)


def test_ids_that_the_tokenizer_lacks_are_left_out_unless_they_end_a_text(folder: Path, tmp_path: Path) -> None:
    assert tokens_without_text(folder, 20, [2]) == tuple(range(12, 20))
    assert tokens_without_text(folder, 20, [2, 15]) == (12, 13, 14, 16, 17, 18, 19)
    assert tokens_without_text(folder, 12, ()) == tokens_without_text(folder, 10, ()) == ()
    assert tokens_without_text(resolve_model("tiny-qwen3")[0], 509, ()) == ()
    with pytest.raises(InputError, match="no id below 0"):
        tokens_without_text(folder, 0, ())


def test_a_conversation_is_put_into_words_by_the_models_own_template(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE})
    )
    turns = [
        {"role": "user", "content": "w6 w7"},
        {"role": "assistant", "content": "w8"},
        {"role": "user", "content": "w9"},
    ]
    expected = (1, 3, 6, 7, 5, 4, 8, 5, 3, 9, 5, 4)
    assert FolderTokenizer(folder).chat(turns) == expected
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    config = replace(resolve_model("tiny-qwen3")[1], vocab_size=20)
    task = open_task("jsonl", folder, config, 0, {"path": str(path), "reward": REWARD})
    assert task.prompts(1, 1) == [expected] and task.longest_prompt == len(expected)
    # A template in a file of its own is the newer form, and goes first.
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system turn') }}")
    with pytest.raises(InputError, match="its chat template: no system turn"):
        FolderTokenizer(folder).chat(turns)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], ":1: messages is no list of turns"),
        ("w6", ":1: messages is no list of turns"),
        ([{"role": "user"}], r":1: messages\[0\] lacks role or content"),
        ([{"role": "assistant", "content": "w6"}], ":1: the last of messages is the assistant's"),
        ([{"role": "user", "content": "w6"}], "no chat template in chat_template.jinja"),
    ],
)
def test_messages_that_cannot_be_asked_are_named(messages: Any, named: str, folder: Path) -> None:
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    config = replace(resolve_model("tiny-qwen3")[1], vocab_size=20)
    with pytest.raises(InputError, match=named):
        open_task("jsonl", folder, config, 0, {"path": str(path), "reward": REWARD})
