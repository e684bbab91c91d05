"""The report of a run as one self-contained HTML file."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from markupsafe import Markup

from diffcheck.report.page import Row, both_widths, write_page
from integration.grpo.mismatch.metric_names import METRIC_NAMES
from integration.grpo.report import coverage
from integration.grpo.report.figures import Figure, draw
from integration.grpo.report.read import Run

#: What the run was: a line each, and all in one line.
_HEAD = ("command", "device", "profile", "model", "task")
_SETTINGS = (
    *("dtype", "tp", "replicas", "staleness", "seed", "prompts_per_step", "group_size", "max_tokens", "temperature"),
    *("top_k", "top_p", "lr", "clip", "kl_coef"),
)
_FIELDS = (
    *("step", "compared", "mismatch_count", "max_abs_diff", "mean_abs_diff", "k3", "ess", "reward_mean", "kl_ref"),
    *("loss", "grad_norm"),
)


def write_report(path: Path, run: Run, against: Run | None, figures: list[Figure]) -> None:
    """Write the page, atomically.

    Args:
        against: the other arm of the experiment; shown in the same figures and tables.

    Raises:
        InputError: ``path`` cannot be written, or jinja2 is missing.
    """
    write_page(path, "report.html.j2", "integration.grpo.report", **_values(run, against, figures))


def _values(run: Run, against: Run | None, figures: list[Figure]) -> dict[str, Any]:
    arms = [run] if against is None else [run, against]
    return {
        "title": f"rlk-grpo: {coverage.headline(run)}",
        "arms": [(arm, coverage.headline(arm), _status(arm)) for arm in arms],
        "settings": _settings(run),
        "figures": [_drawn(figure) for figure in figures],
        "coverage": _side_by_side([dict(coverage.coverage(arm)) for arm in arms]),
        "operators": [
            (arm.mode, [Row([*row[:3], _short(row[3])]) for row in rows])
            for arm in arms
            if (rows := list(coverage.operators(arm)))
        ],
        "time": _time(arms),
        "names": _names(arms),
        "evidence": [(arm.mode, side, facts) for arm in arms for side, facts in coverage.engines(arm)],
        "fields": _FIELDS,
        "step_rows": [(arm.mode, [Row([_cell(step[name]) for name in _FIELDS]) for step in arm.steps]) for arm in arms],
        "notes": [note for arm in arms for note in _notes(arm)],
        "written": f"rlk {version('rlk')}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
    }


def _drawn(figure: Figure) -> tuple[str, Markup, str]:
    """(title, drawing, caption)."""
    return figure.title, both_widths(lambda width: draw(figure, width)), figure.caption


def _status(run: Run) -> str:
    return "diverged" if run.mismatches or run.fallbacks else "equal"


def _settings(run: Run) -> list[tuple[str, str]]:
    told = {**run.config, **run.evidence}
    found = {
        name: ", ".join(text for _, text in coverage.flattened(told[name]))
        for name in (*_HEAD, *_SETTINGS)
        if told.get(name) is not None
    }
    settings = ", ".join(f"{name} {found[name]}" for name in _SETTINGS if name in found)
    return [(name, found[name]) for name in _HEAD if name in found] + ([("settings", settings)] if settings else [])


def _side_by_side(facts: list[dict[str, str]]) -> list[Row]:
    """A row a fact, a column an arm."""
    names = dict.fromkeys(name for one in facts for name in one)
    return [Row([name, *(one.get(name, "–") for one in facts)]) for name in names]


def _short(contract: str) -> str:
    """Enough of a SHA-256 to find it by."""
    return " ≠ ".join(part[:16] for part in contract.split(" ≠ "))


def _time(arms: list[Run]) -> list[Row]:
    """Mean seconds of each phase, and the ratio of the first arm to the second."""
    means = [coverage.seconds(arm) for arm in arms]
    rows = []
    for phase in means[0]:
        cells: list[object] = [phase, *(f"{mean.get(phase, 0.0):.3f}" for mean in means)]
        if len(arms) > 1:
            other = means[1].get(phase, 0.0)
            cells.append(f"{means[0][phase] / other:.2f}" if other else "–")
        rows.append(Row(cells))
    return rows


def _names(arms: list[Run]) -> list[Row]:
    rows = []
    for metric in METRIC_NAMES:
        values = [arm.names[metric.framework].get(metric.name) for arm in arms]
        if any(value is not None for value in values):
            shown = ("–" if value is None else f"{value:.4g}" for value in values)
            rows.append(Row([metric.framework, metric.name, metric.formula, *shown]))
    return rows


def _notes(run: Run) -> list[str]:
    return [f"{run.mode}, step {step['step']}: {step['note']}" for step in run.steps if step.get("note")]


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
