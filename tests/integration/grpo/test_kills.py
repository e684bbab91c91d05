"""kill -9 at random moments, again and again: the steps come out as if nothing had happened."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from integration.grpo.buffer import Buffer
from tests.integration.grpo.grpo_cases import (
    SMALL,
    command,
    finish,
    is_gone,
    kill,
    processes_of,
    records,
    start,
    steps_done,
    wait_for,
)

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.engines, pytest.mark.exhaustive, pytest.mark.timeout(3000)]

VARIANTS = {
    "one-rank": ("", 24, ("trainer", "rollout", "driver", "rollout", "driver", "trainer") * 2),
    "one-step-off": ("staleness = 1\n", 10, ("trainer", "rollout", "driver", "driver")),
    "two-ranks": ("tp = 2\n", 8, ("trainer", "rollout", "driver")),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_runs_give_the_steps_of_an_undisturbed_one(variant: str, tmp_path: Path) -> None:
    more, steps, victims = VARIANTS[variant]
    config = (
        f"{SMALL.replace('checkpoint_stride = 1', 'checkpoint_stride = 2')}steps = {steps}\nmax_restarts = 99\n{more}"
    )
    calm, hunted = tmp_path / "calm", tmp_path / "hunted"
    done = finish(command(calm, config=config))
    assert done.returncode == 0, done.stderr[-2000:]
    rng = random.Random(variant)
    driver, struck = None, []
    for number, victim in enumerate(victims):
        if driver is None or driver.poll() is not None:
            driver = start(command(hunted, *(["--resume"] if (hunted / "config.json").exists() else []), config=config))
        # After so many steps, or in the middle of a start.
        target = min(steps - 1, round((number + 1) * steps / (len(victims) + 1)))
        running = driver
        wait_for(lambda target=target, running=running: steps_done(hunted) >= target or running.poll() is not None, 300)
        time.sleep(rng.uniform(0, 1.0))
        if driver.poll() is not None:
            break
        engines = processes_of(driver.pid, "trainer") + processes_of(driver.pid, "rollout")
        prey = driver.pid if victim == "driver" else rng.choice(processes_of(driver.pid, victim) or [driver.pid])
        kill(prey)
        struck.append(victim)
        if prey == driver.pid:
            driver.wait()
            wait_for(lambda engines=engines: all(map(is_gone, engines)), 30)
    if driver is not None and driver.poll() is None:
        driver.wait(timeout=600)
    done = finish(command(hunted, "--resume", config=config))
    assert done.returncode == 0, done.stderr[-2000:]
    with suppress(OSError):
        (hunted / "struck.json").write_text(json.dumps(struck))
    assert len(struck) == len(victims), "the run was over before the last blow"
    assert records(hunted) == records(calm) and len(records(calm)) == steps
    assert all(record["mismatch_count"] == 0 < record["compared"] for record in records(calm))
    with Buffer.open(hunted / "samples.sqlite", read_only=True) as buffer:
        buffer.check()
        assert [s.state for s in buffer.steps()] == ["synced"] * steps


def test_two_ranks_draw_and_score_as_one(tmp_path: Path) -> None:
    """The first step starts from the same weights: its samples and logprobs are the same bits."""
    config = f"{SMALL}steps = 1\n"
    one, two = tmp_path / "one", tmp_path / "two"
    for out, options in ((one, []), (two, ["--tp", "2"])):
        done = finish(command(out, *options, config=config))
        assert done.returncode == 0, done.stderr[-2000:]
    assert records(one)[0]["samples_digest"] == records(two)[0]["samples_digest"]
    evidence = json.loads((two / "evidence.json").read_text())
    assert evidence["collectives"] == {"backend": "gloo", "ranks": 2}
    assert evidence["train"]["operators"]["all_reduce"]["calls"] > 0


def test_the_trained_model_learns_from_text_and_from_lines(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": f"Count from {i}:", "want": str(i)}) + "\n" for i in range(4)))
    config = (
        'model = "smollm2-135m"\nsteps = 1\nprompts_per_step = 2\ngroup_size = 2\nmax_tokens = 8\n'
        "kl_coef = 0.0\nepochs = 1\nlr = 1e-5\nmax_sequences = 4\nmicro_batch = 2\npreflight_stride = 1\n"
    )
    jsonl = f'[task_options]\npath = "{lines}"\nreward = "tests.integration.grpo.test_kills:counted"\n'
    for task, options in (("text", ""), ("jsonl", jsonl)):
        out = tmp_path / task
        done = finish(command(out, config=f'{config}task = "{task}"\n{options}'))
        assert done.returncode == 0, done.stderr[-2000:]
        (record,) = records(out)
        assert record["mismatch_count"] == 0 < record["compared"]
        (probe,) = json.loads((out / "evidence.json").read_text())["preflight"]
        assert probe["verdict"] == "equal"


def counted(record: dict[str, str], text: str, tokens: list[int]) -> float:
    """A reward: how much of the response is digits."""
    assert tokens and record["want"].isdigit()
    return sum(character.isdigit() for character in text) / max(1, len(text))
