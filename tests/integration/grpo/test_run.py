"""Whole runs with real vLLM and real Megatron-core, and what they survive."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from diffcheck.base.errors import EngineError, ExitCode, InputError, RlkError
from diffcheck.base.models import resolve_model
from integration.grpo.buffer import Buffer, sample_id
from integration.grpo.buffer.records import Buffered
from integration.grpo.config import GrpoConfig
from integration.grpo.loop import Run, check_scores
from integration.grpo.report.command import write
from integration.grpo.workers.engines import Role
from tests.integration.grpo.conftest import SharedEngines
from tests.integration.grpo.grpo_cases import command, finish, is_gone, kill, processes_of, records, start, wait_for
from tests.schemas import conforms

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.engines

STEPS = 3
CONFIG = GrpoConfig(
    steps=STEPS,
    prompts_per_step=4,
    group_size=4,
    max_tokens=6,
    checkpoint_stride=1,
    preflight_stride=2,
    temperature=0.9,
)
# fmt: off
ORDER = [
    "step", "weight_version", "train_version", "compared", "mismatch_count", "max_abs_diff",
    "max_abs_sample", "max_abs_position", "mean_abs_diff", "k1", "k3", "ess", "ratio_min",
    "ratio_mean", "ratio_max", "reward_mean", "reward_std", "kl_ref", "loss", "grad_norm",
    "clip_fraction", "tokens", "response_tokens", "samples_digest", "weights_digest", "seconds",
]
# fmt: on


@pytest.fixture(scope="module")
def strict(engines: SharedEngines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three undisturbed steps."""
    out = tmp_path_factory.mktemp("grpo") / "strict"
    Run(CONFIG, out, engines.open, command="a test").run()
    return out


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same from the command line, natively."""
    out = tmp_path_factory.mktemp("grpo") / "native"
    config = "prompts_per_step = 4\ngroup_size = 4\nmax_tokens = 6\npreflight_stride = 2\ntemperature = 0.9\n"
    done = finish(command(out, "--steps", str(STEPS), "--mode", "native", config=config))
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def test_no_bit_differs_at_any_strict_step(strict: Path) -> None:
    steps = records(strict)
    assert [r["step"] for r in steps] == [1, 2, 3]
    for record in steps:
        assert record["compared"] == 16 * 6 and record["mismatch_count"] == 0 and record["max_abs_diff"] == 0
        assert record["ess"] == record["ratio_mean"] == 1
        assert record["weight_version"] == record["train_version"] == record["step"] - 1
    # The experiment would prove nothing if nothing was learned: the weights and the samples change each time.
    for name in ("weights_digest", "samples_digest"):
        assert len({r[name] for r in steps}) == STEPS
    assert all(r["grad_norm"] > 0 and 0 < r["kl_ref"] < 20 for r in steps) and steps[0]["clip_fraction"] > 0


def test_native_engines_differ_at_every_step(native: Path, strict: Path) -> None:
    steps = records(native)
    assert len(steps) == STEPS and all(r["mismatch_count"] > 0 and r["max_abs_diff"] > 0 for r in steps)
    # Weights that did not reach a native vLLM would leave a far larger gap than rounding does.
    assert all(0 < r["mean_abs_diff"] < 0.05 for r in steps)
    assert steps[0]["samples_digest"] != records(strict)[0]["samples_digest"]


def test_records_have_the_agreed_fields_in_order(strict: Path, native: Path) -> None:
    for out in (strict, native):
        for line in (out / "steps.jsonl").read_text().splitlines():
            record = json.loads(line)
            assert list(record) == ORDER
            assert list(record["seconds"]) == [
                *("rollout", "reward", "recompute", "update", "sync", "preflight", "checkpoint", "total")
            ]


def test_every_file_of_a_run_is_what_its_schema_says(strict: Path, native: Path) -> None:
    for out in (strict, native):
        for line in (out / "steps.jsonl").read_text().splitlines():
            conforms("grpo-step", json.loads(line))
        files = {"config.json": "grpo-config", "evidence.json": "grpo-evidence"}
        files |= {str(path.relative_to(out)): "verdict" for path in out.glob("preflight/*.json")}
        files |= {str(path.relative_to(out)): "grpo-checkpoint" for path in out.glob("checkpoints/*/checkpoint.json")}
        assert len(files) > 3
        for name, schema in files.items():
            conforms(schema, json.loads((out / name).read_text()))


def test_the_buffer_tells_which_weights_made_which_token(strict: Path) -> None:
    with Buffer.open(strict / "samples.sqlite", read_only=True) as buffer:
        buffer.check()
        assert [(s.step, s.state, s.rollout_version, s.train_version) for s in buffer.steps()] == [
            (1, "synced", 0, 0),
            (2, "synced", 1, 1),
            (3, "synced", 2, 2),
        ]
        digests = {w.version: w.digest for w in buffer.weights()}
        assert [r["weights_digest"] for r in records(strict)] == [digests[v] for v in (1, 2, 3)]
        for sample in buffer.samples(3):
            assert sample.rollout_logprobs is not None and sample.train_logprobs is not None
            assert sample.rollout_logprobs.tobytes() == sample.train_logprobs.tobytes()


def test_evidence_says_what_ran(strict: Path, native: Path) -> None:
    evidence = json.loads((strict / "evidence.json").read_text())
    assert evidence["mode"] == "strict" and evidence["fallbacks"] == 0 and evidence["command"] == "a test"
    for side in ("rollout", "train"):
        operators = evidence[side]["operators"]
        layers, forwards = 3, evidence[side]["forwards"]
        assert operators["rms_norm"]["calls"] == (2 * layers + 1) * forwards
        assert operators["attention"]["calls"] >= layers * forwards
        assert all(len(entry["contract_id"]) == 64 for entry in operators.values())
    shared = set(evidence["rollout"]["operators"]) & set(evidence["train"]["operators"])
    assert {"linear", "row_linear", "rope", "swiglu", "lm_head", "logprob"} <= shared
    for name in shared:
        ids = {evidence[side]["operators"][name]["contract_id"] for side in ("rollout", "train")}
        assert len(ids) == 1, f"the engines ran {name} under two contracts"
    assert evidence["rollout"]["kv_paging"]["block_size"] == 32
    assert [(p["step"], p["verdict"]) for p in evidence["preflight"]] == [(1, "equal"), (3, "equal")]
    assert all(p["coverage"] == {"observed": 63, "expected": 63} for p in evidence["preflight"])
    plain = json.loads((native / "evidence.json").read_text())
    assert plain["mode"] == "native" and plain["profile"] is None and plain["rollout"]["operators"] == {}
    assert "Strict" not in json.dumps(plain["rollout"]["engine_facts"])
    assert [p["verdict"] for p in plain["preflight"]] == ["diverged", "diverged"]
    assert all(p["first_divergence"] for p in plain["preflight"])


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("NaN", "sample s000001-p01-g1: the logprob of response token 2 is nan"),
        pytest.param("too few", "sample s000001-p01-g1: 5 logprobs for 6 tokens", marks=pytest.mark.exhaustive),
    ],
)
def test_a_spoilt_rollout_is_refused_and_the_run_goes_on_without_a_trace_of_it(
    fault: str, named: str, engines: SharedEngines, strict: Path, tmp_path: Path
) -> None:
    engines.latest["rollout"].call("spoil", fault=fault)
    one = GrpoConfig(**{**CONFIG.to_json(), "steps": 1, "preflight_stride": 0})
    with pytest.raises(EngineError) as caught:
        Run(one, tmp_path / "run", engines.open).run()
    assert caught.value.cause == named and "resume" in caught.value.remedy
    assert not (tmp_path / "run" / "steps.jsonl").read_text()
    Run(one, tmp_path / "run", engines.open, resume=True).run()
    assert records(tmp_path / "run") == records(strict)[:1]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_recomputed_logprob_that_is_no_number_is_named(value: float) -> None:
    prompt, seed = np.array([5, 6], np.int32), 1
    samples = [
        Buffered(sample_id(1, p, 0), 1, p, 0, "rewarded", 0, prompt, prompt, None, None, 1.0, None, "length", seed)
        for p in range(2)
    ]
    check_scores(samples, [[-1.0, 0.0], [-2.0, -3.0]], "trainer")
    with pytest.raises(
        EngineError, match=f"sample s000001-p01-g0: the trainer's logprob of response token 1 is {value}"
    ):
        check_scores(samples, [[-1.0, 0.0], [-2.0, value]], "trainer")


def share_of_ends(record: dict[str, Any], text: str | None, tokens: list[int]) -> float:
    """A reward that a test names: 1 for a response of tokens of the tokenizer that ends where one of them ends it."""
    return float(max(tokens) < 400 and not any(token >= 300 for token in tokens[:-1]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["strict", "native"])
def test_ends_of_the_model_and_ids_without_text_are_heeded(mode: str, tmp_path: Path) -> None:
    """A model of 509 ids, a tokenizer of 400, of which the last hundred end a text."""
    from tokenizers import Tokenizer, models

    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny-qwen3")[0], folder)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(400)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(300, 400))}))
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n{"prompt_token_ids": [7, 8]}\n')
    config = (
        f'model = "{folder}"\nmode = "{mode}"\ntask = "jsonl"\nprompts_per_step = 2\ngroup_size = 8\n'
        f'preflight_stride = 0\n[task_options]\npath = "{tmp_path}/prompts.jsonl"\n'
        'reward = "tests.integration.grpo.test_run:share_of_ends"\n'
    )
    done = finish(command(tmp_path / "run", "--steps", "1", config=config))
    assert done.returncode == 0 and "109 token ids of the model are not the tokenizer's" in done.stderr
    (record,) = records(tmp_path / "run")
    assert record["reward_mean"] == 1 and record["max_abs_diff"] < 0.1
    assert record["response_tokens"] < 16 * 16 and (mode == "native" or record["mismatch_count"] == 0)


@pytest.mark.exhaustive
def test_a_torn_weight_file_stops_the_run_before_a_rollout(
    engines: SharedEngines, strict: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "trainer", "tests.integration.grpo.faulty_trainer")
    out = tmp_path / "run"
    with pytest.raises(RlkError, match=r"v000002\.safetensors: damaged") as caught:
        Run(CONFIG, out, engines.open).run()
    assert "writes them again" in caught.value.remedy and len(records(out)) == 1
    monkeypatch.undo()
    Run(CONFIG, out, engines.open, resume=True).run()
    assert records(out) == records(strict)


@pytest.mark.exhaustive
def test_killed_engines_are_replaced_and_the_steps_are_the_same(
    engines: SharedEngines, strict: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    victims: dict[int, Role] = {1: "rollout", 2: "trainer"}

    def strike(record: dict[str, Any]) -> None:
        if victim := victims.pop(record["step"], None):
            kill(engines.latest[victim].pids[0])

    before = len(engines.started)
    Run(CONFIG, tmp_path / "run", engines.open, announce=told.append, finished=strike).run()
    assert any("restart 2 of 5" in line for line in told)
    # The engine that was well was not started again.
    assert engines.started[before:] == ["trainer", "rollout", "trainer"]
    assert records(tmp_path / "run") == records(strict)
    restarts = json.loads((tmp_path / "run" / "evidence.json").read_text())["restarts"]
    assert len(restarts) == 2 and "vllm was killed" in restarts[0] and "megatron was killed" in restarts[1]


@pytest.mark.exhaustive
def test_restarts_are_bounded(engines: SharedEngines, strict: Path, tmp_path: Path) -> None:
    def strike(_record: dict[str, Any]) -> None:
        kill(engines.latest["trainer"].pids[0])

    config = GrpoConfig(**{**CONFIG.to_json(), "max_restarts": 0})
    with pytest.raises(EngineError, match="0 restarts are used up") as caught:
        Run(config, tmp_path / "run", engines.open, finished=strike).run()
    assert "--resume" in caught.value.remedy and records(tmp_path / "run") == records(strict)[:1]


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_gives_way_to_the_one_before(engines: SharedEngines, strict: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "run", list[str]()
    two = GrpoConfig(**{**CONFIG.to_json(), "steps": 2})
    Run(two, out, engines.open).run()
    newest = out / "checkpoints" / "step-000002" / "rank0.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    Run(CONFIG, out, engines.open, resume=True, announce=told.append).run()
    assert any("step-000002/rank0.safetensors: damaged: falling back" in line for line in told)
    assert "going on after step 1" in told
    assert records(out) == records(strict)


def test_a_killed_driver_takes_its_engines_along_and_resumes_to_the_same_steps(strict: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = "\n".join(
        f"{name} = {value}"
        for name, value in CONFIG.to_json().items()
        if name in ("steps", "prompts_per_step", "group_size", "max_tokens", "temperature", "checkpoint_stride")
    )
    driver = start(command(out, config=config + "\npreflight_stride = 0\n"))
    wait_for(lambda: (out / "steps.jsonl").exists() and len(records(out)) >= 1)
    engines = processes_of(driver.pid, "rollout") + processes_of(driver.pid, "trainer")
    kill(driver.pid)
    driver.wait()
    assert len(engines) == 2
    wait_for(lambda: all(map(is_gone, engines)), 10)
    done = finish(command(out, "--resume", config=config + "\npreflight_stride = 0\n"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert records(out) == records(strict)


def test_a_folder_with_a_run_is_not_overwritten(strict: Path) -> None:
    with pytest.raises(InputError, match="holds a run already"):
        Run(CONFIG, strict, lambda *_: None)  # type: ignore[arg-type,return-value]
    other = GrpoConfig(**{**CONFIG.to_json(), "seed": 1})
    with pytest.raises(InputError, match="has seed = 0, it cannot go on with 1"):
        Run(other, strict, lambda *_: None, resume=True)  # type: ignore[arg-type,return-value]


def test_outputs_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        Run(CONFIG, tmp_path / "file", lambda *_: None)  # type: ignore[arg-type,return-value]


def test_the_report_tells_both_arms_and_the_operators_that_ran(strict: Path, native: Path, tmp_path: Path) -> None:
    page, told = tmp_path / "report.html", StringIO()
    assert write(strict, native, page, False, Console(file=told, width=120)) is ExitCode.EQUAL
    compared = sum(record["compared"] for record in records(strict))
    assert f"0 of {compared} logprobs differ in {STEPS} steps" in told.getvalue()
    evidence = json.loads((strict / "evidence.json").read_text())
    text = page.read_text()
    for side in ("rollout", "train"):
        for entry in evidence[side]["operators"].values():
            assert entry["contract_id"][:16] in text and f"{entry['calls']:,}" in text
    assert "Figure 4" in text and "native arm" in text


@pytest.mark.exhaustive
def test_a_full_disk_and_a_read_only_one_lose_nothing(engines: SharedEngines, strict: Path, tmp_path: Path) -> None:
    """A file system of its own, too small for two checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> bool:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "rlk-test", disk], capture_output=True, check=False
        )
        return done.returncode == 0

    if not mount("size=12m"):
        pytest.skip("mounting is not allowed here")
    try:
        out = disk / "run"
        with pytest.raises(RlkError) as caught:
            Run(CONFIG, out, engines.open).run()
        assert str(out) in caught.value.cause and "free some space" in caught.value.remedy
        assert records(out) == records(strict)[: len(records(out))]
        assert mount("remount,ro")
        with pytest.raises(RlkError) as caught:
            Run(CONFIG, out, engines.open, resume=True).run()
        assert str(out) in caught.value.cause and caught.value.remedy
        assert mount("remount,rw,size=64m")
        Run(CONFIG, out, engines.open, resume=True).run()
        assert records(out) == records(strict)
    finally:
        subprocess.run(["umount", disk], check=False)
