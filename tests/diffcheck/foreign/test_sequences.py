"""Rollouts of other projects as samples: taken as they are, or refused in one line with nothing written."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.samples import Sample, load_samples
from tests.diffcheck.in_process import refused, rlk

torch = pytest.importorskip("torch")


def one(**changes: Any) -> dict[str, Any]:
    """A sample as slime's ``Sample.to_dict`` gives it."""
    return {
        "group_index": 0, "index": 4, "prompt": "p", "tokens": [5, 6, 7, 8, 9], "response": "r", "response_length": 2,
        "label": None, "reward": 1.0, "loss_mask": [1, 1], "weight_versions": ["3", "3"],
        "rollout_log_probs": [-0.5, -1.25], "status": "completed", "metadata": {}, **changes,
    }  # fmt: skip


def write(path: Path, *samples: dict[str, Any]) -> Path:
    torch.save({"rollout_id": 0, "samples": list(samples)}, path)
    return path


@pytest.mark.parametrize("kind", ["slime", "miles", "vime"])
def test_debug_rollout_data(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "s.jsonl"
    tool = one(index=5, loss_mask=[1, 0])
    plain = one(index=6, rollout_log_probs=None, weight_versions=["3", "4"], tokens=torch.tensor([1, 2, 3]))
    empty = one(index=7, response_length=0, rollout_log_probs=[], loss_mask=[])
    done = rlk("import", kind, str(write(tmp_path / "d.pt", one(), tool, plain, empty)), "--out", str(out))
    assert done.code == 0, done.err
    assert load_samples(out) == [
        Sample((5, 6, 7), (8, 9), (-0.5, -1.25), weight_version=3, id=4),
        Sample((1,), (2, 3), id=6),
    ]
    assert "1 samples left out: some of its response was not drawn" in done.out
    assert "1 with recorded logprobs" in done.out


class Evil:
    """What a pickle can do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pwned",)


HOSTILE: dict[str, Any] = {
    "object": {"samples": [Evil()]},
    "no samples": {"rollout": []},
    "no dict": {"samples": [3]},
    "long response": {"samples": [one(response_length=9)]},
    "negative token": {"samples": [one(tokens=[1, -2, 3])]},
    "logprobs of another length": {"samples": [one(rollout_log_probs=[-1.0])]},
    "positive logprob": {"samples": [one(rollout_log_probs=[0.5, -1.0])]},
    "claimed tensor": {"samples": [one(tokens=torch.zeros(1, dtype=torch.int64).expand(1 << 40))]},
    "nothing left": {"samples": [one(loss_mask=[0, 0])]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rollout_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(HOSTILE[name], "d.pt")
    refused(rlk("import", "slime", "d.pt", "--out", "s.jsonl"), "d.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["d.pt"]


def test_what_is_no_file_of_torch_is_refused(tmp_path: Path) -> None:
    out, path = tmp_path / "s.jsonl", tmp_path / "d.pt"
    path.write_bytes(b"\x80\x04.")
    refused(rlk("import", "slime", str(path), "--out", str(out)), "no file of torch.save")
    whole = write(tmp_path / "w.pt", one()).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(rlk("import", "slime", str(path), "--out", str(out)), "no file of torch.save")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 1_000_000)
    refused(rlk("import", "slime", str(path), "--out", str(out)), "compressed")
    link = tmp_path / "l.pt"
    link.symlink_to(tmp_path / "w.pt")
    refused(rlk("import", "slime", str(link), "--out", str(out)), "is a link")
    assert not out.exists()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "model"
    folder.mkdir()
    words = {"[UNK]": 0, "two": 1, "plus": 2, "is": 3, "four": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_text_of_verl_is_tokenised_only_when_asked(tmp_path: Path, tokenizer: Path) -> None:
    path, out = tmp_path / "12.jsonl", tmp_path / "s.jsonl"
    line = {"input": "two plus two", "output": "is four", "gts": None, "score": 1.0, "step": 12}
    path.write_text(json.dumps(line) + "\n")
    refused(rlk("import", "verl", str(path), "--out", str(out)), "text and no token ids")
    assert not out.exists()
    done = rlk("import", "verl", str(path), "--retokenize", str(tokenizer), "--out", str(out))
    assert done.code == 0, done.err
    assert load_samples(out) == [Sample((1, 2, 1), (3, 4), id="12:0")]
    assert "not those that were drawn" in done.out
    refused(rlk("import", "verl", str(path), "--retokenize", str(tokenizer), "--out", str(out)), "already exists")
    path.write_text(json.dumps({"input": "x"}) + "\n")
    refused(rlk("import", "verl", str(path), "--out", str(tmp_path / "n")), "field 'output' is no text")
    path.write_text("[1]\n")
    refused(rlk("import", "verl", str(path), "--out", str(tmp_path / "n")), "no JSON object")


def test_completions_of_trl(tmp_path: Path, tokenizer: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path, out = tmp_path / "completions_00003.parquet", tmp_path / "s.jsonl"
    columns = {"step": [3], "prompt": ["two plus"], "completion": ["four"], "reward": [1.0], "advantage": [0.0]}
    pq.write_table(pa.table(columns), path)
    refused(rlk("import", "trl", str(path), "--out", str(out)), "text and no token ids")
    assert rlk("import", "trl", str(path), "--retokenize", str(tokenizer), "--out", str(out)).code == 0
    assert load_samples(out) == [Sample((1, 2), (4,), id="completions_00003:0")]
    ids = {**columns, "prompt_ids": [[1, 2]], "completion_ids": [[4, 3]], "logprobs": [[-0.5, -2.0]]}
    pq.write_table(pa.table(ids), path)
    assert rlk("import", "trl", str(path), "--out", str(out), "--overwrite").code == 0
    assert load_samples(out) == [Sample((1, 2), (4, 3), (-0.5, -2.0), id="completions_00003:0")]
    messages = {**columns, "prompt": [[{"role": "user", "content": "two"}]]}
    pq.write_table(pa.table(messages), path)
    refused(rlk("import", "trl", str(path), "--out", str(tmp_path / "n")), "messages")
    path.write_bytes(b"PAR1" + b"\0" * 40 + b"PAR1")
    refused(rlk("import", "trl", str(path), "--out", str(tmp_path / "n")), "completions_00003")


def test_options_that_change_nothing_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.pt", one())
    out = ("--out", str(tmp_path / "o"))
    refused(rlk("import", "nobody", str(path), *out), "format 'nobody'")
    refused(rlk("import", "slime", str(path), "--model", "tiny-qwen3", *out), "--model would change nothing")
    refused(rlk("import", "slime", str(path), "--side", "rollout", *out), "--side would change nothing")
    refused(rlk("import", "sglang", str(tmp_path), *out), "--model")
    refused(rlk("import", "sglang", str(tmp_path), "--model", "tiny-qwen3", *out), "not a dump of SGLang")
