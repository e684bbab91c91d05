"""Signals, temporary files and full disks: commands end in order, with nothing left behind."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffcheck.base.errors import ExitCode
from diffcheck.base.models import resolve_model
from diffcheck.base.stopping import child_command

ROOT = Path(__file__).parents[3]


def environment(scratch: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "diffcheck.cli", *words]


def descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary folder of a short name, in which sockets can be."""
    with tempfile.TemporaryDirectory(prefix="rlk-t-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_as_ctrl_c_does(number: signal.Signals, tmp_path: Path, scratch: Path) -> None:
    """Exit code of the signal, no engine left, no temporary folder, nothing half-written."""
    samples = tmp_path / "s.jsonl"
    samples.write_text(json.dumps({"prompt_token_ids": [1] * 200, "response_token_ids": [2] * 200}) + "\n")
    words = ["localize", "--rollout", "reference", "--train", "reference", "--samples", str(samples)]
    # a shell that ran the tests in the background, or under nohup, may have had the signal ignored
    listening = functools.partial(signal.signal, number, signal.SIG_DFL)
    process = subprocess.Popen(
        command(*words),
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(scratch),
        preexec_fn=listening,
    )
    assert process.stderr is not None
    while "reference forward" not in process.stderr.readline():
        assert process.poll() is None
    engines = descendants(process.pid)
    assert len(engines) == 2
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "interrupted" in rest and "Traceback" not in rest
    assert not any(map(alive, engines)) and list(scratch.iterdir()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["s.jsonl"]


def test_a_child_dies_with_its_parent_also_while_it_imports(tmp_path: Path) -> None:
    """The driver is killed, so that it can tell nobody, while its engine is still importing."""
    (tmp_path / "slow.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    driver = (
        "import subprocess, sys, time; from diffcheck.base.stopping import child_command; "
        "p = subprocess.Popen(child_command(sys.executable, 'slow'), stdout=subprocess.PIPE, start_new_session=True); "
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(600)"
    )
    where = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True, env=where)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert alive(child)
    process.kill()
    process.wait()
    end = time.monotonic() + 5
    while alive(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(child)
    # A child whose parent was gone before it could ask ends by itself.
    stranger = child_command(sys.executable, "slow")
    stranger[3] = "1"
    assert subprocess.run(stranger, env=where, timeout=60, check=False).returncode == 1


def test_a_run_leaves_no_temporary_file(tmp_path: Path, scratch: Path) -> None:
    done = subprocess.run(
        command("localize", "--rollout", "reference", "--train", "reference", "--layers", "0:1"),
        capture_output=True,
        text=True,
        env=environment(scratch),
        check=False,
    )
    assert done.returncode == ExitCode.EQUAL, done.stderr
    assert list(scratch.iterdir()) == []


@pytest.mark.engines
def test_two_ranks_leave_no_socket(tmp_path: Path, scratch: Path) -> None:
    words = ["capture", "--engine", "vllm", "--tp", "2", "--generate", "2", "--out", str(tmp_path / "t")]
    done = subprocess.run(command(*words), capture_output=True, text=True, env=environment(scratch), check=False)
    assert done.returncode == 0, done.stderr
    assert list(scratch.iterdir()) == []


def limited() -> None:
    """No file of this process and its children may grow past 16 KiB: what a full disk says, of any file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))


@pytest.mark.parametrize("what", ["capture", "model", "samples-out"])
def test_a_full_disk_names_the_file_and_leaves_nothing(what: str, tmp_path: Path, scratch: Path) -> None:
    resolve_model("tiny-qwen3")
    samples = tmp_path / "s.jsonl"
    lines = 1 if what == "capture" else 400
    samples.write_text((json.dumps({"prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}) + "\n") * lines)
    words = ["capture", "--engine", "reference", "--samples", str(samples), "--out", str(tmp_path / "t")]
    where = environment(scratch)
    if what == "model":
        where["RLK_CACHE"] = str(tmp_path / "cache")
    if what == "samples-out":
        words += ["--samples-out", str(tmp_path / "out.jsonl"), "--layers", "0:1", "--level", "digest"]
    done = subprocess.run(command(*words), capture_output=True, text=True, env=where, preexec_fn=limited, check=False)
    assert done.returncode == ExitCode.USAGE, done.stderr
    named = {"capture": "rank0-00000.safetensors", "model": "tiny-qwen3", "samples-out": "t"}[what]
    assert "File too large" in done.stderr and named in done.stderr, done.stderr
    assert "internal error" not in done.stderr and "Traceback" not in done.stderr
    left = [p for p in tmp_path.rglob("*") if "partial" in p.name or p.name in ("t", "out.jsonl")]
    assert left == []
