"""Checkpoints on disk: whole or absent, whatever happens in the middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffcheck.base.errors import InputError
from integration.grpo.checkpoint import MANIFEST, Checkpoints
from integration.grpo.steplog import append_step, keep_steps, read_steps


def save(checkpoints: Checkpoints, step: int, text: str = "state") -> None:
    (checkpoints.stage(step) / "rank0.safetensors").write_text(f"{text} {step}")
    checkpoints.commit(step, {"digest": f"d{step}"})


def newest(checkpoints: Checkpoints) -> tuple[int | None, list[str]]:
    told: list[str] = []
    found = checkpoints.newest(told.append)
    return (None if found is None else found.step), told


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert newest(checkpoints) == (None, [])
    for step in (2, 4, 6):
        save(checkpoints, step)
    found = checkpoints.newest(lambda _: None)
    assert found is not None and found.step == 6 and found.facts == {"digest": "d6"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000006"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "foreign"])
def test_a_damaged_one_gives_way_to_the_one_before_and_that_is_said(damage: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 1)
    save(checkpoints, 2)
    folder = tmp_path / "step-000002"
    file, manifest = folder / "rank0.safetensors", folder / MANIFEST
    if damage == "flip":
        file.write_text("statf 2")
    elif damage == "cut":
        file.write_text("st")
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:40])
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "step": 7}))
    step, told = newest(checkpoints)
    assert step == 1 and len(told) == 1 and "step-000002" in told[0] and "falling back" in told[0]


def test_what_was_only_staged_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.stage(3) / "rank0.safetensors").write_text("half")
    assert newest(checkpoints) == (None, [])
    assert not list(checkpoints.stage(3).iterdir()), "what a killed writer left is not mixed with the new"


def test_a_step_that_is_done_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.forget_after(1)
    assert newest(checkpoints) == (1, [])
    save(checkpoints, 1, "again")
    assert (tmp_path / "step-000001" / "rank0.safetensors").read_text() == "again 1"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        Checkpoints(tmp_path / "file", keep=1).stage(1)


def test_steps_are_appended_torn_lines_are_none_and_later_ones_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert read_steps(path) == []
    for step in (1, 2, 3):
        append_step(path, {"step": step})
    with path.open("a") as stream:
        stream.write('{"step": 4, "rew')
    assert [r["step"] for r in read_steps(path)] == [1, 2, 3]
    assert keep_steps(path, 2) == [{"step": 1}, {"step": 2}]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    with pytest.raises(InputError, match=r"ends at step 2, the checkpoint is of step 5"):
        keep_steps(path, 5)


@pytest.mark.parametrize("line", ["not json", '{"step": 3}', "[]", "{}"])
def test_a_foreign_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(InputError, match=r"steps\.jsonl:2: not the record of step 2"):
        read_steps(path)
    with pytest.raises(InputError):
        append_step(tmp_path / "nowhere" / "steps.jsonl", {"step": 1})
