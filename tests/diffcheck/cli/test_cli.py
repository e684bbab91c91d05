"""rlk-diff at the shell: exit codes, one-line causes, remedies, and nothing half-written."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import pytest

from diffcheck.base.errors import ExitCode
from diffcheck.base.models import resolve_model
from tests.diffcheck import in_process
from tests.diffcheck.synthetic import flip, header, pair, values, write

REFERENCE = ["localize", "--rollout", "reference", "--train", "reference"]


def rlk(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In this process: another interpreter's start takes longer than most of these commands."""
    with chdir(cwd or Path.cwd()):
        done = in_process.rlk(*arguments)
    return subprocess.CompletedProcess(arguments, done.code, done.out, done.err)


def refused(done: subprocess.CompletedProcess[str], words: str, code: ExitCode = ExitCode.USAGE) -> None:
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "remedy:" in done.stderr and "Traceback" not in done.stderr + done.stdout


def model_copy(folder: Path) -> Path:
    source, _ = resolve_model("tiny-qwen3")
    return Path(shutil.copytree(source, folder / "model"))


def test_compare_of_equal_and_of_diverged_traces(tmp_path: Path) -> None:
    pair(tmp_path, flip("layers.1.mlp.act", 2, 5))
    out = tmp_path / "v.json"
    done = rlk("compare", str(tmp_path / "left"), str(tmp_path / "right"), "--json", str(out))
    assert done.returncode == ExitCode.DIVERGED
    assert "DIVERGED" in done.stdout and "layers.1.mlp.act" in done.stdout and "Coverage: 44 of 44" in done.stdout
    verdict = json.loads(out.read_text())
    first = verdict["first_divergence"]
    assert (first["boundary"], first["sample"], first["position"], first["index"]) == ("layers.1.mlp.act", 0, 2, 5)
    assert first["role"] == "origin" and verdict["schema"] == 1 and verdict["coverage"]["unobserved"] == []
    assert {r["status"] for r in verdict["boundaries"]} == {"equal", "origin"}
    done = rlk("compare", str(tmp_path / "left"), str(tmp_path / "left"))
    assert done.returncode == ExitCode.EQUAL and "EQUAL" in done.stdout


def test_compare_of_another_object_exits_3(tmp_path: Path) -> None:
    head = header()
    head.object.temperature = 0.7
    write(tmp_path / "a", values())
    write(tmp_path / "b", values(), head)
    done = rlk("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert done.returncode == ExitCode.NOT_COMPARABLE and "temperature" in done.stdout
    assert "First divergence" not in done.stdout


def test_compare_of_nothing_exits_4(tmp_path: Path) -> None:
    write(tmp_path / "a", {"norm": values()["norm"]})
    write(tmp_path / "b", {"logits": values()["logits"]})
    assert rlk("compare", str(tmp_path / "a"), str(tmp_path / "b")).returncode == ExitCode.INCONCLUSIVE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/no/such/folder"], "/no/such/folder: no such folder"),
        (["--rollout", "sglang"], "'sglang' is neither an engine nor a trace folder"),
        (["--samples", "/no/such.jsonl"], "/no/such.jsonl: no such samples file"),
        (["--layers", "3:1"], "'3:1' is not a range"),
        (["--dtype", "int8"], "'int8' is none of"),
        (["--temperature", "0"], "not positive"),
        (["--tp", "3"], "4 attention heads cannot be divided"),
        (["--override", "nonsense"], "'nonsense' is malformed"),
        (["--profile", "strict-v0"], "strict-v0"),
        (["--json", "/no/such/folder/v.json"], "/no/such/folder"),
        (["--override", "object: rope_theta=x"], "is not a finite float"),
        (["--override", "weights.no.such: flip=0"], "no.such"),
        (["--override", "weights.model.norm.weight: flip=9999"], "outside the tensor"),
        (["--override", "layers.*.mlp.act: rounding.silly=bfloat16"], "rounding.silly"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str) -> None:
    refused(rlk(*REFERENCE, *arguments), words)


def test_a_foreign_model_is_named(tmp_path: Path) -> None:
    folder = model_copy(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    refused(rlk(*REFERENCE, "--model", str(folder)), "MambaForCausalLM is not supported")
    (folder / "config.json").write_text("{}")
    refused(rlk(*REFERENCE, "--model", str(folder)), "config.json")
    (folder / "config.json").unlink()
    refused(rlk(*REFERENCE, "--model", str(folder)), "no such file")


def test_a_torn_weight_file_is_named(tmp_path: Path) -> None:
    folder = model_copy(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    refused(rlk(*REFERENCE, "--model", str(folder)), "model.safetensors")
    weights.unlink()
    refused(rlk(*REFERENCE, "--model", str(folder)), "no *.safetensors")


def test_bad_samples_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"prompt_token_ids": [1], "response_token_ids": [2]}\n{"prompt_token_ids": [1,]}\n')
    refused(rlk(*REFERENCE, "--samples", str(path)), f"{path}:2")
    path.write_text('{"prompt_token_ids": [1], "response_token_ids": [509]}\n')
    refused(rlk(*REFERENCE, "--samples", str(path)), "response_token_ids[0] = 509 is outside the vocabulary")
    path.write_text('{"prompt_token_ids": [1], "response_token_ids": []}\n')
    refused(rlk(*REFERENCE, "--samples", str(path)), "response of length 0")
    path.write_text("")
    refused(rlk(*REFERENCE, "--samples", str(path)), "no samples")


def test_a_damaged_trace_is_named(tmp_path: Path) -> None:
    pair(tmp_path, lambda _: None)
    (path,) = (tmp_path / "left").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-5])
    refused(rlk("compare", str(tmp_path / "left"), str(tmp_path / "right")), path.name)


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a capture: exit 130, no trace, no engine left running."""
    out = tmp_path / "trace"
    command = [sys.executable, "-m", "diffcheck.cli", "capture", "--engine", "reference", "--out", str(out)]
    samples = tmp_path / "s.jsonl"
    samples.write_text(json.dumps({"prompt_token_ids": [1] * 200, "response_token_ids": [2] * 200}) + "\n")
    process = subprocess.Popen(
        [*command, "--samples", str(samples)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A background job hands down the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    while "reference forward" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in rest and "Traceback" not in rest
    assert [p.name for p in tmp_path.iterdir()] == ["s.jsonl"]


def test_help_has_examples() -> None:
    for command in ("localize", "capture", "compare"):
        done = rlk(command, "--help")
        assert done.returncode == 0 and f"rlk-diff {command}" in done.stdout


def test_unknown_commands_and_options_exit_2() -> None:
    for arguments in (["lokalize"], ["localize", "--modell", "x"], ["compare", "one"]):
        done = rlk(*arguments)
        assert done.returncode == ExitCode.USAGE and "Traceback" not in done.stderr


def test_doctor_names_the_engines() -> None:
    done = rlk("doctor")
    assert "megatron-core" in done.stdout and "vllm" in done.stdout
