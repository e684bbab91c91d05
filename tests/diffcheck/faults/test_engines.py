"""Faults inside real vLLM and real Megatron-core are named where they were put, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diffcheck.faults.engines import Engines, chosen, describe, run_real, sides
from diffcheck.faults.real_library import REAL_CONTROLS, REAL_FAULTS
from diffcheck.faults.runs import RealFault, Run, Setup

pytestmark = pytest.mark.engines

RUNS = list(chosen(None, None))
#: Those that one vLLM and one Megatron, both strict and in bfloat16, serve.
SHARED = [(fault, run) for fault, run in RUNS if replace(run.setup, alone=False) == Setup()]


def _name(pair: tuple[RealFault, Run]) -> str:
    return f"{pair[0].name}-{describe(pair[1])}"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(tmp_path_factory.mktemp("engines"), lambda *_: None) as live:
        yield live


@pytest.mark.parametrize("pair", SHARED, ids=_name)
def test_what_was_put_in_is_named(pair: tuple[RealFault, Run], engines: Engines) -> None:
    outcome = run_real(*pair, engines, explained=False)
    assert outcome.found, outcome.wrong
    assert outcome.verdict == pair[1].verdict


@pytest.mark.parametrize("engine", ["vllm", "megatron"])
def test_nothing_is_left_behind_and_a_fault_can_be_missed(engine: str, engines: Engines) -> None:
    fault = REAL_FAULTS["silu-rounded"]
    (run,) = (r for r in fault.runs if r.engine == engine)
    missed = run_real(fault, replace(run, changes=()), engines, explained=False)
    assert not missed.found and missed.verdict == "equal"
    assert not run_real(fault, replace(run, where="layers.0.mlp.down_proj"), engines, explained=False).found
    blamed = run_real(fault, replace(run, where="", verdict="equal"), engines, explained=False)
    assert blamed.wrong == ["verdict diverged, expected equal", "named layers.0.mlp.act, expected nothing"]


def test_runs_are_told_apart_and_controls_are_there() -> None:
    """Results are kept by name and pair; each control is one of both kinds of pair or of one engine."""
    names = [_name(pair) for pair in RUNS]
    assert len(set(names)) == len(names)
    assert {run.verdict for control in REAL_CONTROLS.values() for run in control.runs} == {"equal"}
    assert not REAL_FAULTS.keys() & REAL_CONTROLS.keys()
    natives = [run for _, run in RUNS if run.setup.profile is None]
    assert natives and all(left.engine == right.engine for left, right in map(sides, natives))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_whole_library(tmp_path: Path) -> None:
    """Every run, with inference where it must name a contract field."""
    with Engines(tmp_path, lambda *_: None) as engines:
        wrong = [(o.name, o.engine, o.wrong) for o in (run_real(*pair, engines) for pair in RUNS) if not o.found]
    assert wrong == []
