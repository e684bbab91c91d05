"""Every fault of the library is named where it was injected; what is no fault is not blamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diffcheck.base.errors import ExitCode
from diffcheck.faults import CONTROLS, FAULTS, run_fault, scores
from diffcheck.faults.table import markdown
from tests.diffcheck.cli.test_cli import rlk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("laboratory")


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named(name: str, folder: Path) -> None:
    outcome = run_fault(FAULTS[name], folder)
    assert outcome.found, outcome.wrong
    assert outcome.verdict == FAULTS[name].verdict


@pytest.mark.parametrize("name", CONTROLS)
def test_the_control_stays_equal(name: str, folder: Path) -> None:
    outcome = run_fault(CONTROLS[name], folder)
    assert outcome.found and outcome.verdict == "equal" and outcome.report is not None
    assert outcome.report.logprobs is not None and outcome.report.logprobs.mismatch_count == 0


def test_a_wrong_expectation_fails(folder: Path) -> None:
    """The library can fail: another boundary, another field, a fault that was not injected."""
    fault = FAULTS["silu-rounded"]
    assert not run_fault(replace(fault, where="layers.0.mlp.down_proj"), folder, explained=False).found
    assert not run_fault(replace(fault, fields=("primitives.silu",)), folder).found
    missed = run_fault(replace(fault, overrides=()), folder, explained=False)
    assert not missed.found and missed.verdict == "equal"
    steady = FAULTS["nondeterministic-loss"]
    assert "verdict diverged" in run_fault(replace(steady, rerun=steady.overrides), folder).wrong[0]
    blamed = replace(CONTROLS["other-page-size"], overrides=fault.overrides)
    outcomes = [run_fault(blamed, folder), missed, run_fault(fault, folder, explained=False)]
    assert scores(outcomes) == (0.5, 0.5)


def test_the_command() -> None:
    done = rlk("faults", "silu-rounded")
    assert done.returncode == ExitCode.EQUAL, done.stderr
    words = "rounds silu(gate) to bfloat16 before the multiply"
    assert "Why: layers.0.mlp.act" in done.stdout and words in done.stdout and "ok" in done.stdout
    done = rlk("faults", "--list")
    assert done.returncode == ExitCode.EQUAL and "stale-prefix-cache" in done.stdout
    wrong = (
        [],
        ["no-such-fault"],
        ["silu-rounded", "--all"],
        ["silu-rounded", "--engine", "sglang"],
        ["silu-rounded", "--engine", "reference", "--real"],
        ["positions-zigzag", "--engine", "reference"],
        ["qkv-not-interleaved", "--engine", "vllm"],
    )
    for arguments in wrong:
        done = rlk("faults", *arguments)
        assert done.returncode == ExitCode.USAGE and "Traceback" not in done.stderr, arguments


def test_the_page_shows_every_fault_and_what_was_found() -> None:
    """``docs/faults.md`` holds the table of ``python -m diffcheck.faults.table``, and all of it was found."""
    table = markdown()
    assert table in (Path(__file__).parents[3] / "docs" / "faults.md").read_text()
    assert ": " not in "".join(row.split(" | ", 4)[4] for row in table.splitlines()[2:])
