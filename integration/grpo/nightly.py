"""200 GRPO steps, strict and native, and whether they prove what they should: ``python -m integration.grpo.nightly``.

Goes on where it was interrupted. Ends with 1 if a strict step has a mismatch, a native step has none (then the
experiment would prove nothing), the reward does not rise, a preflight fails or something fell back, or the trained
model's engines diverge at a boundary.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from diffcheck.base.console import Terminal
from diffcheck.base.errors import ExitCode
from diffcheck.base.files import write_text
from diffcheck.base.progress import silent
from diffcheck.capture.adapter import package_versions
from diffcheck.cli import guard
from diffcheck.runs import RunSettings, run_localize
from integration.grpo.config import PROFILE, GrpoConfig, stored_config
from integration.grpo.evidence import PACKAGES
from integration.grpo.loop import Run
from integration.grpo.steplog import read_steps
from integration.grpo.workers.engines import open_process

RESULTS = Path(__file__).parent.parent / "results" / "nightly"
MODES = ("strict", "native")
#: Steps at each end whose mean reward is compared, and the gain that counts as learning.
ENDS, GAIN = 20, 0.3
TRAINED, TRAINED_TOKENS = "smollm2-135m", 64
_console = Terminal(stderr=True)

Records = Sequence[dict[str, Any]]
#: A name, whether it holds, and what was found.
Check = tuple[str, bool, str]


def check_strict(records: Records, steps: int) -> Check:
    """No bit of any compared token differs, at any step."""
    wrong = [r["step"] for r in records if r["mismatch_count"] or r["max_abs_diff"] != 0 or not r["compared"]]
    compared = sum(r["compared"] for r in records)
    found = (
        f"{len(records)} of {steps} steps, {compared} logprobs compared, mismatches at {len(wrong)} steps {wrong[:5]}"
    )
    return "strict: no mismatch at any step", len(records) == steps and not wrong, found


def check_native(records: Records, steps: int) -> Check:
    """Native engines differ at every step: otherwise equality would be no achievement."""
    equal = [r["step"] for r in records if not r["mismatch_count"]]
    least = min((r["mismatch_count"] for r in records), default=0)
    found = (
        f"{len(records)} of {steps} steps, at least {least} mismatches a step, none at {len(equal)} steps {equal[:5]}"
    )
    return "native: a mismatch at every step", len(records) == steps and not equal, found


def check_reward(records: Records, mode: str) -> Check:
    """The reward rises."""
    rewards = [r["reward_mean"] for r in records]
    first, last = (sum(part) / max(1, len(part)) for part in (rewards[:ENDS], rewards[-ENDS:]))
    return f"{mode}: the reward rises by {GAIN} or more", last - first >= GAIN, f"from {first:.3f} to {last:.3f}"


def check_evidence(evidence: dict[str, Any], mode: str) -> Check:
    """Nothing fell back, and every preflight saw every boundary and, in a strict run, found it equal."""
    probes = evidence["preflight"]
    bad = [p["step"] for p in probes if p["verdict"] != ("equal" if mode == "strict" else "diverged")]
    if mode == "strict":
        bad += [p["step"] for p in probes if p["coverage"]["observed"] != p["coverage"]["expected"]]
    found = f"{len(probes)} preflights, unexpected at steps {bad[:5]}; {evidence['fallbacks']} fallbacks"
    return f"{mode}: preflights and evidence", bool(probes) and not bad and evidence["fallbacks"] == 0, found


def check_trained() -> Check:
    """A trained model, all its layers, through both strict engines."""
    settings = RunSettings(model=TRAINED, profile=PROFILE, generate=TRAINED_TOKENS)
    verdict, _ = run_localize(settings, "vllm", "megatron", silent)
    coverage = verdict.coverage
    whole = coverage is not None and coverage.observed == coverage.expected > 0
    return f"{TRAINED}: equal at every boundary", verdict.verdict == "equal" and whole, verdict.summary


def run_arm(mode: str, steps: int, folder: Path) -> Records:
    """One arm, from its newest checkpoint if there is one."""
    out = folder / mode
    if len(done := read_steps(out / "steps.jsonl")) == steps:
        return done
    config = GrpoConfig(mode=mode, steps=steps)
    run = Run(
        config,
        out,
        open_process,
        resume=stored_config(out) is not None,
        command="make nightly",
        announce=lambda text: _console.print(f"{mode}: {text}", style="dim", soft_wrap=True),
        finished=lambda r: _progress(mode, r) if r["step"] % 10 == 0 else None,
    )
    return run.run()


def _progress(mode: str, record: dict[str, Any]) -> None:
    _console.print(
        f"{mode}: step {record['step']}, reward {record['reward_mean']:.3f}, "
        f"mismatch {record['mismatch_count']} of {record['compared']}",
        highlight=False,
    )


def publish(folder: Path, results: Path, checks: Sequence[Check], seconds: dict[str, float]) -> None:
    """Copy what a reader needs into ``results``: steps, evidence, configuration, checks, report and figures."""
    from integration.grpo.report.command import write

    results.mkdir(parents=True, exist_ok=True)
    write(folder / "strict", folder / "native", results / "report.html", False, _console)
    for mode in MODES:
        (results / mode).mkdir(exist_ok=True)
        for name in ("steps.jsonl", "evidence.json", "config.json"):
            shutil.copyfile(folder / mode / name, results / mode / name)
    shutil.rmtree(results / "figures", ignore_errors=True)
    shutil.copytree(folder / "strict" / "figures", results / "figures")
    summary = {
        "schema": 1,
        "command": "make nightly",
        "versions": package_versions(*PACKAGES) | {"python": platform.python_version()},
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count()},
        "passed": all(passed for _, passed, _ in checks),
        "checks": [{"name": name, "passed": passed, "found": found} for name, passed, found in checks],
        "seconds": seconds,
    }
    write_text(results / "nightly.json", json.dumps(summary, indent=1) + "\n")


def nightly(
    folder: Annotated[Path, typer.Option("--folder", help="Where the runs live; kept for a resume.")] = Path("nightly"),
    results: Annotated[Path, typer.Option("--results", help="Where the results go.")] = RESULTS,
    steps: Annotated[int, typer.Option("--steps", min=2 * ENDS)] = 200,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew.")] = False,
) -> None:
    """Both arms, the trained model, the checks and the report."""
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    checks: list[Check] = []
    seconds: dict[str, float] = {}
    for mode in MODES:
        records = run_arm(mode, steps, folder)
        checks.append((check_strict if mode == "strict" else check_native)(records, steps))
        checks.append(check_reward(records, mode))
        checks.append(check_evidence(json.loads((folder / mode / "evidence.json").read_text()), mode))
        # Of the steps, so that it is the same after an interruption.
        seconds[mode] = round(sum(r["seconds"]["total"] for r in records), 1)
    start = time.monotonic()
    checks.append(check_trained())
    seconds[TRAINED] = round(time.monotonic() - start, 1)
    publish(folder, results, checks, seconds)
    for name, passed, found in checks:
        _console.print(
            Text.assemble(("ok  ", "green") if passed else ("FAIL", "red"), f" {name}: {found}"), soft_wrap=True
        )
    raise typer.Exit(ExitCode.EQUAL if all(passed for _, passed, _ in checks) else ExitCode.DIVERGED)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(nightly)
    sys.exit(guard(lambda: app(standalone_mode=False)))
