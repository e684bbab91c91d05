"""A verdict says what repeats it, and where its processors could be the cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.diffcheck.in_process import rlk
from tests.diffcheck.synthetic import header, values, write

NATIVE = {"profile": "vllm-0.32-cpu"}


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        (
            ("vllm", {"processor": "AMX"}),
            ("reference", NATIVE),
            "vllm-0.32-cpu of the train side was measured on",
        ),
        (("vllm", {"processor": "AVX-512 BF16"}), ("reference", NATIVE), ""),
        (("vllm", {}), ("reference", NATIVE), ""),
        (("vllm", {"processor": "AMX"}), ("reference", {"profile": "strict-v1/fma32-seq"}), ""),
        (
            ("vllm", {"processor": "AMX"}),
            ("megatron", {"processor": "AVX2"}),
            "side ran on AMX, the train side on AVX2",
        ),
        (("vllm", {"processor": "AMX"}), ("megatron", {"processor": "AMX"}), ""),
        (
            ("vllm", {"processor": "AMX", "strict": {}}),
            ("megatron", {"processor": "AVX2", "strict": {}}),
            "",
        ),
    ],
)
def test_another_class_of_processor_is_said(
    left: tuple[str, dict[str, object]], right: tuple[str, dict[str, object]], words: str, tmp_path: Path
) -> None:
    for name, (engine, evidence) in (("left", left), ("right", right)):
        head = header(engine)
        head.evidence = dict(evidence)
        write(tmp_path / name, values(), head)
    done = rlk("compare", str(tmp_path / "left"), str(tmp_path / "right"), "--json", "-")
    notes = json.loads(done.out)["notes"]
    found = [note for note in notes if "another order" in note]
    assert (len(found), bool(found and words in found[0])) == (int(bool(words)), bool(words)), notes


def test_page_and_json_say_what_repeats_a_run(tmp_path: Path) -> None:
    samples, out, page = tmp_path / "s.jsonl", tmp_path / "v.json", tmp_path / "p.html"
    samples.write_text('{"prompt_token_ids": [5, 6, 7], "response_token_ids": [8, 9]}\n')
    both = ("--rollout", "reference", "--train", "reference", "--samples", str(samples))
    assert rlk("localize", *both, "--json", str(out), "--html", str(page)).code == 0
    evidence = json.loads(out.read_text())["evidence"]
    repeat, shown = evidence["repeat"], page.read_text().replace("<wbr>", "")
    assert repeat["model"] == "tiny-qwen3" and evidence["left"]["versions"]
    for name in ("command", "rlk", "processor", "model", "model_sha256", "samples_sha256"):
        assert repeat[name] and f">{name}<" in shown, name
    assert repeat["model_sha256"] in shown and repeat["samples_sha256"] in shown and ">seed<" in shown
