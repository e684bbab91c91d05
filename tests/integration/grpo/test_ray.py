"""Ray actors carry the engines: the same calls, errors and deaths as child processes, and the same bits."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diffcheck.base.errors import EngineDiedError, EngineError, InputError
from integration.grpo.config import GrpoConfig
from integration.grpo.loop import Run
from integration.grpo.workers.engines import open_process
from integration.grpo.workers.ray_engines import Replicas, open_ray, share, together
from tests.integration.grpo import grpo_cases

ray = pytest.importorskip("ray")
CASES = "tests.integration.grpo.ray_cases"
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.fixture
def make(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Opens actors, and ends them."""
    monkeypatch.setenv("RLK_TEST_VARIABLE", "carried")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    opened = []

    def open_one(role: Any = "trainer", options: dict[str, Any] | None = None, **settings: Any) -> Any:
        objects = {"trainer": f"{CASES}:Rank", "rollout": f"{CASES}:Drawer"}
        actor = open_ray(role, GrpoConfig(ray=True, **settings), options or {}, tmp_path, **objects)
        opened.append(actor)
        return actor

    yield open_one
    for actor in opened:
        actor.close(hurry=True)


def test_two_ranks_form_a_group_and_rank_0_answers(make: Make, tmp_path: Path) -> None:
    actor = make(tp=2)
    actor.wait_ready()
    assert actor.is_idle and len(set(actor.pids)) == 2
    where = actor.call("where")
    assert (where["RANK"], where["WORLD_SIZE"], where["VLLM_LOGGING_LEVEL"]) == ("0", "2", "ERROR")
    assert where["RLK_TEST_VARIABLE"] == "carried" and int(where["OMP_NUM_THREADS"]) >= 1
    assert actor.call("together") == {"sum": 3.0}
    assert actor.call("count", by=2) == {"count": 2, "rank": "0"}
    # As between processes, everything is JSON on the way: tuples become lists, floats keep their bits.
    assert actor.call("kinds", value=(0.1, 5e-324)) == {"kind": "list", "value": [0.1, 5e-324]}
    actor.start("count", by=1)
    assert not actor.is_idle
    assert actor.result()["count"] == 3 and actor.is_idle
    assert (tmp_path / "trainer.log").read_text().count("a line for the log") == 2


@pytest.mark.exhaustive
def test_errors_of_any_rank_are_told_and_deaths_are_deaths(make: Make) -> None:
    actor = make(tp=2)
    actor.wait_ready()
    for rank in (0, 1):
        with pytest.raises(EngineError, match="megatron: no") as found:
            actor.call("refuse", rank=rank)
        assert found.value.remedy == "ask for something else" and not isinstance(found.value, EngineDiedError)
    assert actor.is_idle and actor.call("count", by=1)["count"] == 1
    with pytest.raises(EngineError, match="KeyError"):
        actor.call("break_down")
    assert not actor.is_idle
    actor.close(hurry=True)
    other = make(tp=2)
    other.wait_ready()
    with pytest.raises(EngineDiedError, match="megatron ended unexpectedly"):
        other.call("die", rank=1)
    assert not other.is_idle


def test_an_engine_that_cannot_start_says_why(make: Make) -> None:
    actor = make(options={"broken": True})
    with pytest.raises(EngineError, match="megatron: cannot start") as found:
        actor.wait_ready()
    assert found.value.remedy == "mend it" and not actor.is_idle


def test_replicas_share_the_prompts_and_keep_their_order(make: Make) -> None:
    actor = make("rollout", replicas=2)
    assert isinstance(actor, Replicas)
    actor.wait_ready()
    requests = [{"id": f"s000001-p{p:02d}-g{g}", "seed": 10 * p + g} for p in range(3) for g in range(2)]
    actor.call("sync", version=4)
    records = actor.call("generate", requests=requests, version=4)["records"]
    assert [r["id"] for r in records] == [r["id"] for r in requests]
    assert [r["tokens"] for r in records] == [[r["seed"]] for r in requests]
    assert len({r["pid"] for r in records}) == 2 == len(set(actor.pids))
    assert actor.call("evidence")["operators"] == {"linear": {"calls": 8, "contract_id": "c"}}


def test_shares_are_whole_prompts() -> None:
    requests = [{"id": f"s000001-p{p:02d}-g{g}"} for p in range(5) for g in range(3)]
    for replicas in (1, 2, 3, 5, 8):
        parts = share(requests, replicas)
        assert len(parts) == replicas and [r for part in parts for r in part] == requests
        assert all(len(part) % 3 == 0 for part in parts)
        assert max(map(len, parts)) - min(map(len, parts)) <= 3


def test_evidence_of_replicas_is_added_and_must_agree() -> None:
    one = {
        "forwards": 3,
        "scheduler": {"tokens": 7, "requests_at_once": 4},
        "operators": {"linear": {"calls": 2, "contract_id": "a"}},
        "fallbacks": 1,
    }
    found = together([one, {**one, "scheduler": {"tokens": 1, "requests_at_once": 9}}])
    assert (found["replicas"], found["forwards"], found["fallbacks"]) == (2, 6, 2)
    assert found["scheduler"] == {"tokens": 8, "requests_at_once": 9}
    with pytest.raises(EngineError, match="two contracts of linear"):
        together([one, {**one, "operators": {"linear": {"calls": 2, "contract_id": "b"}}}])


def test_a_cluster_that_is_too_small_is_refused(make: Make) -> None:
    make()
    have = int(ray.cluster_resources()["CPU"])
    with pytest.raises(InputError, match=f"has {have} CPUs, {have + 2} actors"):
        make("rollout", replicas=have + 1)
    with pytest.raises(InputError, match="GPUs"):
        make(engine="gpu")


@pytest.mark.engines
@pytest.mark.exhaustive
@pytest.mark.parametrize("more", ["tp = 2\n", "staleness = 1\n"], ids=["two ranks each", "one step off"])
def test_a_run_in_ray_actors_has_the_bits_of_one_in_child_processes(more: str, tmp_path: Path) -> None:
    """Two rollout replicas against one; each engine of one rank, or of two."""
    config = f"{grpo_cases.SMALL}steps = 3\n{more}".replace("preflight_stride = 0", "preflight_stride = 2")
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    done = grpo_cases.finish(grpo_cases.command(alone, config=config))
    assert done.returncode == 0, done.stderr
    done = grpo_cases.finish(grpo_cases.command(spread, "--ray", config=f"{config}replicas = 2\n"))
    assert done.returncode == 0, done.stderr
    assert grpo_cases.records(spread) == grpo_cases.records(alone)
    assert all(record["mismatch_count"] == 0 < record["compared"] for record in grpo_cases.records(spread))
    evidence = json.loads((spread / "evidence.json").read_text())
    assert evidence["rollout"]["replicas"] == 2 and evidence["fallbacks"] == 0
    assert {found["verdict"] for found in evidence["preflight"]} == {"equal"}
    assert not list((spread / "preflight").glob("*/*"))


@pytest.mark.engines
@pytest.mark.exhaustive
def test_a_killed_replica_and_a_killed_trainer_leave_the_bits_as_they_were(cluster: None, tmp_path: Path) -> None:
    """Rollout replica 1 is killed after step 1, the trainer after step 2; the run goes on by itself."""
    settings = {"prompts_per_step": 4, "group_size": 4, "max_tokens": 6, "checkpoint_stride": 1, "preflight_stride": 0}
    config = GrpoConfig(steps=3, ray=True, replicas=2, **settings)
    actors: dict[str, Any] = {}
    left = [(1, "rollout"), (2, "trainer")]

    def opened(role: Any, *arguments: Any) -> Any:
        actors[role] = open_ray(role, *arguments)
        return actors[role]

    def kill(record: dict[str, Any]) -> None:
        if left and record["step"] == left[0][0]:
            os.kill(actors[left.pop(0)[1]].pids[-1], signal.SIGKILL)

    told: list[str] = []
    Run(config, tmp_path / "killed", opened, announce=told.append, finished=kill).run()
    assert not left and sum("restart" in line for line in told) == 2, told
    Run(replace(config, ray=False, replicas=1), tmp_path / "whole", open_process).run()
    assert grpo_cases.records(tmp_path / "killed") == grpo_cases.records(tmp_path / "whole")
