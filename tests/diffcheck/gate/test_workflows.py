"""The example workflows ask for commands and options that exist."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer.main
import yaml

from diffcheck.cli import app

FOLDER = Path(__file__).parents[3] / "docs" / "ci"


@pytest.mark.parametrize("name", ["gate-cpu.yml", "gate-gpu.yml"])
def test_every_command_of_a_workflow_exists(name: str) -> None:
    workflow = yaml.safe_load((FOLDER / name).read_text())
    group = typer.main.get_command(app)
    lines = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    ours = [words for words in map(shlex.split, lines) if words[0] in (".venv/bin/rlk-diff", "$RLK")]
    assert sum("gate" in words for words in ours) >= 1 and sum("twice" in words for words in ours) >= 1
    for _, command, *arguments in ours:
        known = {option for p in group.commands[command].params for option in p.opts}  # type: ignore[attr-defined]
        assert {a for a in arguments if a.startswith("--")} <= known, arguments
