"""200 GRPO steps on a GPU in pieces of a few minutes, killed on the way, and what they prove.

``python -m integration.grpo.h200 run`` goes on with whatever arm is not finished until its time is up; repeat it until
it says that nothing is left. ``cross`` does three steps from one seed on the device that is named, ``publish`` checks
everything and writes the results. Each command can be repeated; the folder keeps what was done.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diffcheck.base.errors import ExitCode, InputError
from diffcheck.base.files import write_text
from diffcheck.capture.adapter import package_versions
from diffcheck.cli import guard
from integration.grpo.benchmarks import PARTS
from integration.grpo.config import load_config
from integration.grpo.evidence import PACKAGES
from integration.grpo.nightly import MODES, Check, Records, check_evidence, check_native, check_strict
from integration.grpo.steplog import read_steps

HERE = Path(__file__).parent
CONFIG, CROSS = HERE / "h200.toml", HERE / "cross.toml"
RESULTS = HERE.parent / "results" / "h200"
FOLDER = Path("nightly") / "h200"
#: Steps after which the strict run is killed, of 200: soon after a checkpoint, so that little is done again.
KILLS = (27, 102)
#: Logprobs that must have been compared, and the aim.
LEAST, AIM = 1_000_000, 10_000_000
#: Limit of a strict step's time over a native one's.
RATIO = 1.25
#: Seconds without which starting engines is not worth it.
_START = 90
_console = Console(stderr=True)
_Folder = Annotated[Path, typer.Option("--folder", help="Where the runs live; kept from piece to piece.")]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.command()
def run(
    seconds: Annotated[float, typer.Option("--seconds", min=60, help="Of this piece.")] = 540,
    folder: _Folder = FOLDER,
    config: Annotated[Path, typer.Option("--config")] = CONFIG,
    arms: Annotated[str, typer.Option("--arms", help="In this order.")] = ",".join(MODES),
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Of every arm; default: the file's.")] = None,
    native_steps: Annotated[int | None, typer.Option("--native-steps", min=1, help="Of the native arm.")] = None,
    engine: Annotated[str, typer.Option("--engine", help="cpu only to try this command out.")] = "gpu",
) -> None:
    """One piece: the strict run, killed twice, then the native one."""
    end = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    whole = steps or load_config(config, {}).steps
    for mode in arms.split(","):
        wanted = native_steps or whole if mode == "native" else whole
        while not _arm(mode, wanted, folder, config, engine, end):
            if end - time.monotonic() < _START:
                _console.print(f"{mode}: {_done(folder / mode)} of {wanted} steps: run this again")
                return
    _console.print("nothing is left: cross, then publish")


def _arm(mode: str, steps: int, folder: Path, config: Path, engine: str, end: float) -> bool:
    """Start an arm, or go on with it, until it is done, killed or out of time. Whether it is done.

    Raises:
        InputError: the run failed by itself.
    """
    out = folder / mode
    if _done(out) >= steps:
        return True
    if end - time.monotonic() < _START:
        return False
    killed = folder / "killed.json"
    kills: list[dict[str, Any]] = json.loads(killed.read_text()) if killed.exists() else []
    command = [sys.executable, "-m", "integration.grpo", "run", "--config", str(config), "--out", str(out)]
    command += ["--mode", mode, "--engine", engine, "--steps", str(steps)]
    command += ["--seconds", str(max(1, int(end - time.monotonic())))]
    if (out / "config.json").exists():
        command.append("--resume")
    due = [at * steps // 200 for at in KILLS][len(kills) :] if mode == "strict" else []
    process = subprocess.Popen(command)
    while process.poll() is None:
        time.sleep(0.02)
        if due and _done(out) >= max(1, due[0]):
            process.send_signal(signal.SIGKILL)
            process.wait()
            records = _without_seconds(read_steps(out / "steps.jsonl"))
            write_text(killed, json.dumps([*kills, {"after": len(records), "records": records}]))
            _console.print(f"{mode}: killed after step {len(records)}")
            return False
    if process.returncode == ExitCode.DIVERGED:
        raise InputError(f"{mode}: the engines diverged", f"see {out}")
    if process.returncode:
        raise InputError(f"{mode}: the run ended with {process.returncode}", f"see {out / 'logs'}")
    return _done(out) >= steps


@app.command()
def cross(
    engine: Annotated[str, typer.Option("--engine", help="cpu or gpu: the device of this machine to use.")],
    out: Annotated[Path, typer.Option("--out", help="The digests go here, as JSON.")],
    folder: _Folder = FOLDER,
    config: Annotated[Path, typer.Option("--config")] = CROSS,
    model: Annotated[str | None, typer.Option("--model")] = None,
    task: Annotated[str | None, typer.Option("--task")] = None,
) -> None:
    """Three steps from one seed: digests of tokens and logprobs of both engines, and of the weights, step by step."""
    place = folder / f"cross-{engine}"
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "integration.grpo", "run", "--config", str(config), "--out", str(place)]
    command += ["--engine", engine]
    command += [part for name, value in (("--model", model), ("--task", task)) if value for part in (name, value)]
    code = subprocess.run(command, check=False).returncode
    if code not in (ExitCode.EQUAL, ExitCode.DIVERGED):
        raise InputError(f"the run on {engine} ended with {code}", f"see {place / 'logs'}")
    evidence = json.loads((place / "evidence.json").read_text()) if (place / "evidence.json").exists() else {}
    names = ("step", "compared", "mismatch_count", "samples_digest", "loss", "grad_norm", "weights_digest")
    found = {
        "schema": 1,
        "engine": engine,
        "device": evidence.get("rollout", {}).get("engine_facts", {}).get("device"),
        "versions": package_versions(*PACKAGES) | {"python": platform.python_version()},
        "config": json.loads((place / "config.json").read_text()),
        "steps": [{name: record[name] for name in names} for record in read_steps(place / "steps.jsonl")],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json.dumps(found, indent=1) + "\n")
    _console.print(f"{len(found['steps'])} steps on {found['device'] or engine}: {out}")


@app.command()
def publish(
    folder: _Folder = FOLDER,
    results: Annotated[Path, typer.Option("--results", help="Where the results go.")] = RESULTS,
) -> None:
    """Check what the arms say, and write steps, evidence, configuration, report, figures, summary and ratios."""
    from integration.grpo.report.command import write

    results.mkdir(parents=True, exist_ok=True)
    arms = {mode: read_steps(folder / mode / "steps.jsonl") for mode in MODES}
    wanted = {
        mode: json.loads((folder / mode / "config.json").read_text())["steps"] for mode, rows in arms.items() if rows
    }
    checks: list[Check] = []
    for mode, steps in wanted.items():
        evidence = json.loads((folder / mode / "evidence.json").read_text())
        checks.append((check_strict if mode == "strict" else check_native)(arms[mode], steps))
        checks.append(check_evidence(evidence, mode))
        if mode == "strict":
            checks += [check_compared(arms[mode]), check_scheduler(evidence), check_graphs(evidence)]
    checks.append(check_kills(folder, arms["strict"]))
    checks += check_cross(results)
    for mode in wanted:
        (results / mode).mkdir(exist_ok=True)
        for name in ("steps.jsonl", "evidence.json", "config.json"):
            shutil.copyfile(folder / mode / name, results / mode / name)
    if len(wanted) == len(MODES):
        write(folder / "strict", folder / "native", results / "report.html", False, _console)
        shutil.rmtree(results / "figures", ignore_errors=True)
        shutil.copytree(folder / "strict" / "figures", results / "figures")
        write_text(results / "bench.json", json.dumps(ratios(arms, folder), indent=1) + "\n")
    summary = {
        "schema": 1,
        "command": "python -m integration.grpo.h200 run; ... cross; ... publish",
        "versions": package_versions(*PACKAGES) | {"python": platform.python_version()},
        "machine": _machine(folder),
        "passed": all(passed for _, passed, _ in checks),
        "checks": [{"name": name, "passed": passed, "found": found} for name, passed, found in checks],
        "seconds": {m: round(sum(r["seconds"]["total"] for r in rows), 1) for m, rows in arms.items()},
    }
    write_text(results / "h200.json", json.dumps(summary, indent=1) + "\n")
    for name, passed, found in checks:
        _console.print(
            f"[{'green' if passed else 'red'}]{'ok  ' if passed else 'FAIL'}[/] {name}: {found}", soft_wrap=True
        )
    raise typer.Exit(ExitCode.EQUAL if summary["passed"] else ExitCode.DIVERGED)


def check_compared(records: Records) -> Check:
    """Enough tokens for the count to mean something."""
    compared = sum(record["compared"] for record in records)
    return f"strict: at least {LEAST:,} logprobs compared", compared >= LEAST, f"{compared:,} (aim {AIM:,})"


def check_scheduler(evidence: dict[str, Any]) -> Check:
    """What makes batches change under way happened, all of it."""
    found = _counted(evidence, "scheduler")
    counts = {name: found.get(name, 0) for name in ("prefix_cache_hits", "prefill_chunks", "preemptions")}
    text = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
    return "strict: prefix hits, chunked prefills and preemptions", all(counts.values()), text


def check_graphs(evidence: dict[str, Any]) -> Check:
    """Whole decodes and pieces were replayed."""
    totals: dict[str, list[int]] = {}
    for part in [*evidence["earlier"], evidence]:
        for mode, counts in part["rollout"]["graphs"]["modes"].items():
            total = totals.setdefault(mode, [0, 0])
            total[0] += counts["forwards"]
            total[1] += counts["replays"]
    text = ", ".join(f"{mode}: {f:,} forwards, {r:,} replays" for mode, (f, r) in sorted(totals.items()))
    return (
        "strict: FULL and PIECEWISE graphs replayed",
        all(totals.get(m, [0, 0])[1] for m in ("FULL", "PIECEWISE")),
        text,
    )


def check_kills(folder: Path, records: Records) -> Check:
    """Steps that were done before a kill came out the same afterwards."""
    path = folder / "killed.json"
    kills = json.loads(path.read_text()) if path.exists() else []
    final = _without_seconds(records)
    wrong = [kill["after"] for kill in kills if final[: kill["after"]] != kill["records"]]
    after = ", ".join(str(kill["after"]) for kill in kills)
    name = "strict: killed and resumed twice, the same steps.jsonl"
    return name, len(kills) >= len(KILLS) and not wrong, f"killed after steps {after or 'none'}, unlike at {wrong}"


def check_cross(results: Path) -> list[Check]:
    """One digest from both devices: of each pair cross-cpu*.json and cross-gpu*.json in ``results``."""
    checks = []
    for cpu in sorted(results.glob("cross-cpu*.json")):
        gpu = cpu.with_name(cpu.name.replace("cross-cpu", "cross-gpu"))
        if not gpu.exists():
            continue
        left, right = (json.loads(path.read_text()) for path in (cpu, gpu))
        pairs = list(zip(left["steps"], right["steps"], strict=False))
        same = 0
        for a, b in pairs:
            if a["samples_digest"] != b["samples_digest"]:
                break
            same += 1
        weights = sum(a["weights_digest"] == b["weights_digest"] for a, b in pairs)
        name = f"one digest of logprobs on {left['device']} and {right['device']}"
        found = f"{left['config']['model']}: {same} of {len(pairs)} steps, weights after {weights} updates"
        checks.append((name, bool(pairs) and same == len(pairs), found))
    return checks


def ratios(arms: Mapping[str, Records], folder: Path) -> dict[str, Any]:
    """Time of a strict step over a native one, a response token each, by part: the arms draw other tokens."""
    usable = {
        mode: {r["step"]: r for r in rows if r["step"] > 1 and not r["seconds"]["preflight"]}
        for mode, rows in arms.items()
    }
    both = sorted(set(usable["strict"]) & set(usable["native"]))
    if not both:
        return {}
    spent = {
        mode: {
            part: [sum(rows[s]["seconds"][p] for p in phases) / rows[s]["response_tokens"] * 1e6 for s in both]
            for part, phases in PARTS.items()
        }
        for mode, rows in usable.items()
    }
    middle = {
        mode: {part: statistics.median(values) for part, values in parts.items()} for mode, parts in spent.items()
    }
    return {
        "schema": 1,
        "command": "python -m integration.grpo.h200 run",
        "versions": package_versions(*PACKAGES) | {"python": platform.python_version()},
        "machine": _machine(folder),
        "steps": len(both),
        "microseconds a response token, median": {
            mode: {part: round(value, 2) for part, value in parts.items()} for mode, parts in middle.items()
        },
        "seconds a step, median": {
            mode: {
                part: round(statistics.median(sum(rows[s]["seconds"][p] for p in phases) for s in both), 3)
                for part, phases in PARTS.items()
            }
            for mode, rows in usable.items()
        },
        "ratios": {part: round(middle["strict"][part] / middle["native"][part], 3) for part in PARTS},
        "limits": {"step": RATIO},
    }


def _counted(evidence: dict[str, Any], what: str) -> dict[str, int]:
    """Counts of the rollout engines of all pieces together."""
    total: dict[str, int] = {}
    for part in [*evidence["earlier"], evidence]:
        for name, count in part["rollout"][what].items():
            total[name] = max(total.get(name, 0), count) if name == "requests_at_once" else total.get(name, 0) + count
    return total


def _machine(folder: Path) -> dict[str, Any]:
    evidence = json.loads((folder / "strict" / "evidence.json").read_text())
    return {
        "device": evidence["rollout"]["engine_facts"]["device"],
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
    }


def _without_seconds(records: Records) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def _done(out: Path) -> int:
    """Finished steps of a run."""
    path = out / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    sys.exit(guard(lambda: app(args=None if arguments is None else list(arguments), standalone_mode=False)))


if __name__ == "__main__":
    main()
