"""What a run's evidence says of how much was seen, in rows for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from integration.grpo.report.read import Run

Facts = list[tuple[str, str]]


def headline(run: Run) -> str:
    """One sentence: what was compared, and what differs."""
    steps = f"{len(run.steps)} step{'s' * (len(run.steps) != 1)}"
    told = f"{run.mismatches:,} of {run.compared:,} logprobs differ in {steps}"
    if not run.mismatches:
        return told
    worst = run.worst
    place = f"step {worst['step']}, sample {worst['max_abs_sample']}, position {worst['max_abs_position']}"
    return f"{told}; max |Δ| {number(worst['max_abs_diff'])} nats ({place}), mean {number(run.mean_abs_diff)}"


def coverage(run: Run) -> Facts:
    """How much was compared, and what was not."""
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(run.samples.items()))
    response = sum(step["response_tokens"] for step in run.steps)
    unseen = response - run.compared
    versions = {step["weight_version"] for step in run.steps}
    stale = sum(step["weight_version"] != step["step"] - 1 for step in run.steps)
    facts = [
        ("steps", f"{len(run.steps):,}"),
        ("samples", states),
        ("response tokens", f"{response:,}, {run.compared:,} compared, {unseen:,} not"),
        ("weight versions", f"{len(versions):,}, each compared with itself only"),
        ("fallbacks", str(run.fallbacks)),
        ("preflights", _preflights(run)),
    ]
    if restarts := run.evidence.get("restarts"):
        facts.append(("restarts", f"{len(restarts)}: {'; '.join(map(str, restarts))}"))
    seen = run.evidence.get("steps")
    if isinstance(seen, list) and seen and seen[-1] < len(run.steps):
        facts.append(("evidence", f"up to step {seen[-1]}: it is written with checkpoints"))
    if stale:
        facts.insert(4, ("one step off", f"{stale:,} steps were rolled out by the weights before the newest"))
    return facts


def _preflights(run: Run) -> str:
    found = run.evidence["preflight"]
    if not found:
        return "none was run"
    verdicts = [str(entry.get("verdict")) for entry in found]
    steps = ", ".join(str(entry.get("step")) for entry in found)
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))
    boundaries = dict.fromkeys(str(entry["first_divergence"]) for entry in found if entry.get("first_divergence"))
    first = f", first at {', '.join(boundaries)}" if boundaries else ""
    return f"{counts}{first} (before step {steps}){_observed(found[-1])}"


def _observed(entry: dict[str, Any]) -> str:
    seen = entry.get("coverage")
    if not isinstance(seen, dict) or "observed" not in seen:
        return ""
    return f"; {seen['observed']} of {seen.get('expected')} boundaries observed on both sides"


def operators(run: Run) -> Iterator[tuple[str, str, str, str]]:
    """(operator, calls in the rollout, calls in the trainer, contract ids): ids differ where engines do.

    Calls are of all engines that the run had, those before a restart included.
    """
    lives = [*run.evidence.get("earlier", ()), run.evidence]
    found: dict[str, dict[str, int]] = {}
    ids: dict[str, dict[str, None]] = {}
    for life in lives:
        for side in ("rollout", "train"):
            for name, entry in (life[side].get("operators") or {}).items():
                calls = found.setdefault(name, {})
                calls[side] = calls.get(side, 0) + entry["calls"]
                ids.setdefault(name, {})[str(entry["contract_id"])] = None
    for name in sorted(found):
        rollout, train = (f"{found[name][side]:,}" if side in found[name] else "–" for side in ("rollout", "train"))
        yield name, rollout, train, " ≠ ".join(ids[name])


def engines(run: Run) -> Iterator[tuple[str, Facts]]:
    """What else each side says of itself, flattened: KV paging, prefix cache, preemptions, patches, collectives."""
    for side in ("rollout", "train"):
        rest = {key: value for key, value in run.evidence[side].items() if key != "operators"}
        yield side, list(flattened(rest))
    shown = ("schema", "rollout", "train", "preflight", "mode", "fallbacks", "earlier")
    yield "run", list(flattened({key: value for key, value in run.evidence.items() if key not in shown}))


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every leaf of JSON data."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flattened(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for i, inner in enumerate(value):
            yield from flattened(inner, f"{name}.{i}")
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value)) or "–"
    else:
        yield name, "–" if value in (None, {}) else str(value)


def seconds(run: Run) -> dict[str, float]:
    """Mean seconds a step, by phase."""
    phases = run.steps[0]["seconds"]
    return {phase: sum(step["seconds"][phase] for step in run.steps) / len(run.steps) for phase in phases}


def number(value: float | None, digits: int = 3) -> str:
    """A measured value; null in steps.jsonl stands for one that is not finite."""
    return "not finite" if value is None else f"{value:.{digits}g}"
