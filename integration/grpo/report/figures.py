"""The figures of a run, strict and native arm in one drawing: as data, then drawn for a page or as files.

Pages draw them by `diffcheck.report.charts`, with the page's own colours, light or dark, which matplotlib would write
into the SVG; files are drawn by matplotlib, for papers and slides.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from diffcheck.base.files import write_text
from diffcheck.report.charts import Plot, Scale, span
from integration.grpo.report.read import PHASES, Run

Points = list[tuple[float, float]]
#: Steps that a trailing mean covers.
WINDOW = 10
#: Phases that each have a layer of their own.
_MAIN_PHASES = ("rollout", "recompute", "update", "sync")
#: Colours of series 1 to 6 in files: those of the page's light sheet, distinct in print and to the colour-blind.
_COLOURS = ("#1f6f9f", "#b8400e", "#007a5e", "#9a6b00", "#8c4a78", "#5d6368")
_STYLES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (8, 3, 2, 3)), (0, (1, 3)), (0, (12, 4)))


@dataclass(frozen=True)
class Series:
    """One line, or one layer of a stack: y is its thickness there."""

    label: str
    points: Points
    #: Number of its colour and dashes, 1 to 6.
    style: int
    #: Marks in place of a line.
    marks: bool = False


@dataclass(frozen=True)
class Panel:
    """Axes over steps. With ``log``, zeros lie on a line of their own below all other values."""

    y_label: str
    series: list[Series]
    log: bool = False
    stacked: bool = False

    @property
    def drawable(self) -> bool:
        return any(math.isfinite(y) for one in self.series for _, y in one.points)


@dataclass(frozen=True)
class Figure:
    """Panels above one another."""

    name: str
    title: str
    caption: str
    panels: list[Panel]


def figures(run: Run, against: Run | None = None) -> list[Figure]:
    """All figures, in the order of the report. ``run`` has style 1, ``against`` style 2."""
    arms = [(run, 1)] + ([(against, 2)] if against is not None else [])

    def lines(field: str) -> list[Series]:
        return [Series(arm.mode, _points(arm, lambda step: step[field]), style) for arm, style in arms]

    counts = [Series("compared", _points(run, lambda step: step["compared"]), 6)]
    counts += [Series(f"{one.label}: differ", one.points, one.style) for one in lines("mismatch_count")]
    drawn = [
        Figure(
            "figure-1-mismatch",
            "Figure 1. Logprobs that differ in any bit",
            "Response tokens whose logprob differs between rollout and trainer, NaN as one class, and the largest "
            "difference of each step. The lowest line of the second panel is exactly zero.",
            [Panel("tokens a step", counts), Panel("max |Δ logprob|, nats", lines("max_abs_diff"), log=True)],
        ),
        Figure(
            "figure-2-mean-difference",
            "Figure 2. Mean |Δ logprob|, and the KL it amounts to",
            "Over the tokens of each step. k3 is the mean of r - 1 - log r, r = exp(train - rollout): an estimate of "
            "KL(rollout ‖ train), which would be zero if both computed the same function.",
            [
                Panel("mean |Δ logprob|, nats", lines("mean_abs_diff"), log=True),
                Panel("k3, nats a token", lines("k3"), log=True),
            ],
        ),
        Figure(
            "figure-3-reward",
            "Figure 3. Reward",
            f"Mean over the samples of a step, and over the last {WINDOW} steps.",
            [Panel("reward", [one for arm, style in arms for one in _rewards(arm, style)])],
        ),
        Figure(
            "figure-4-kl",
            "Figure 4. KL to the weights that the run began with",
            "Of the policy that is trained, estimated on the tokens of each step.",
            [Panel("nats a token", lines("kl_ref"))],
        ),
        Figure(
            "figure-5-time",
            "Figure 5. Time of a step",
            "Wall-clock seconds by phase, one panel an arm.",
            [_time(arm) for arm, _ in arms],
        ),
    ]
    return [figure for figure in drawn if all(panel.drawable for panel in figure.panels)]


def _rewards(run: Run, style: int) -> list[Series]:
    means = _points(run, lambda step: step["reward_mean"])
    return [
        Series(f"{run.mode}, each step", means, style, marks=True),
        Series(f"mean of the last {WINDOW}", _trailing(means), style),
    ]


def _points(run: Run, value: Callable[[dict[str, Any]], float | None]) -> Points:
    """(step, value); what a step does not have is NaN, which breaks the line."""
    found = [(float(step["step"]), value(step)) for step in run.steps]
    return [(x, math.nan if y is None else float(y)) for x, y in found]


def _trailing(points: Points) -> Points:
    ys = [y for _, y in points]
    return [(x, sum(ys[max(0, i + 1 - WINDOW) : i + 1]) / min(WINDOW, i + 1)) for i, (x, _) in enumerate(points)]


def _time(run: Run) -> Panel:
    layers = [Series(phase, _seconds(run, (phase,)), i) for i, phase in enumerate(_MAIN_PHASES, start=1)]
    rest = [phase for phase in PHASES[:-1] if phase not in _MAIN_PHASES]
    layers.append(Series(", ".join(rest), _seconds(run, rest), 6))
    return Panel(f"seconds, {run.mode} arm", layers, stacked=True)


def _seconds(run: Run, phases: Sequence[str]) -> Points:
    return _points(run, lambda step: sum(step["seconds"][phase] for phase in phases))


def _limits(panel: Panel) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Limits of x and y, and where zero lies on a logarithmic axis."""
    xs = [x for s in panel.series for x, _ in s.points]
    layers = _layers(panel.series)[-1][1] if panel.stacked else [p for s in panel.series for p in s.points]
    low, high = span((y for *_, y in layers), panel.log)
    zero = low / 10 if panel.log else -math.inf
    if panel.log and any(y == 0 for *_, y in layers):
        low = zero / 2
    elif low == 0 and not panel.stacked:
        # A line of zeros must not lie on the axis.
        low = -0.03 * high
    return (min(xs) - 0.5, max(xs) + 0.5), (low, high), zero


def _layers(series: Sequence[Series]) -> list[tuple[Series, list[tuple[float, float, float]]]]:
    """(x, bottom, top) of each layer of a stack."""
    floor = [0.0] * len(series[0].points)
    layers = []
    for one in series:
        top = [low + y for low, (_, y) in zip(floor, one.points, strict=True)]
        layers.append((one, [(x, low, up) for (x, _), low, up in zip(one.points, floor, top, strict=True)]))
        floor = top
    return layers


def _lifted(panel: Panel, points: Iterable[tuple[float, float]], zero: float) -> Points:
    return [(x, zero if panel.log and y == 0 else y) for x, y in points]


def draw(figure: Figure, width: int) -> Markup:
    """``figure`` for a page, ``width`` CSS pixels wide."""
    return Markup("").join(_draw(panel, width, figure.title) for panel in figure.panels)


def _draw(panel: Panel, width: int, title: str) -> Markup:
    x, y, zero = _limits(panel)
    height = 220 if width > 500 else 190

    # Nothing lies between two steps.
    steps = [tick for tick in Scale(*x, 0, 1).ticks(max(2, width // 90)) if tick[0] == round(tick[0])]

    def axes(ticks: list[tuple[float, str]] | None) -> Plot:
        labels = {"x_label": "step", "y_label": panel.y_label}
        return Plot(width, height, x, y, **labels, x_ticks=steps, y_ticks=ticks, log_y=panel.log)

    plot = axes(None)
    if y[0] < zero:
        plot = axes([(zero, "0"), *((value, label) for value, label in plot.y.ticks(5) if value > zero * 5)])
    if panel.stacked:
        for one, layer in _layers(panel.series):
            plot.band(layer, one.style, one.label)
        return plot.svg(f"{title}: {panel.y_label}")
    for one in panel.series:
        points = _lifted(panel, one.points, zero)
        if one.marks or len(points) == 1:
            plot.dots(((x, y) for x, y in points if math.isfinite(y)), one.style, one.label)
        else:
            plot.line(points, one.style, one.label)
    return plot.svg(f"{title}: {panel.y_label}")


def save(drawn: Sequence[Figure], folder: Path) -> list[Path]:
    """Write each figure as an SVG file, atomically; the same figures give the same bytes.

    Raises:
        InputError: matplotlib is not installed, or ``folder`` cannot be written.
    """
    from diffcheck.base.errors import InputError

    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise InputError("figures need matplotlib, which is not installed", "pip install 'rlk[report]'") from None
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}", "make it writable, or free some space") from None
    paths = []
    settings = {"svg.hashsalt": "rlk", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
    with matplotlib.rc_context({**settings, "axes.spines.right": False, "font.family": "sans-serif"}):
        for figure in drawn:
            canvas = Canvas(figsize=(6.4, 0.4 + 2.3 * len(figure.panels)), layout="constrained")
            for panel, axes in zip(
                figure.panels, canvas.subplots(len(figure.panels), squeeze=False)[:, 0], strict=True
            ):
                _plot(panel, axes)
            canvas.suptitle(figure.title)
            text = io.StringIO()
            canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": figure.title})
            paths.append(folder / f"{figure.name}.svg")
            write_text(paths[-1], text.getvalue())
    return paths


def _plot(panel: Panel, axes: Any) -> None:
    x, y, zero = _limits(panel)
    if panel.stacked:
        for one, layer in _layers(panel.series):
            at, low, high = zip(*layer, strict=True)
            colour = _COLOURS[one.style - 1]
            axes.fill_between(at, low, high, color=colour, label=one.label, linewidth=0, step="mid")
    else:
        for one in panel.series:
            at, values = zip(*_lifted(panel, one.points, zero), strict=True)
            style = {"color": _COLOURS[one.style - 1], "label": one.label}
            if one.marks or len(at) == 1:
                axes.plot(at, values, linestyle="none", marker=".", markersize=3, **style)
            else:
                axes.plot(at, values, linestyle=_STYLES[one.style - 1], linewidth=1.2, **style)
    if panel.log:
        axes.set_yscale("log")
        if y[0] < zero:
            ticks = [(zero, "0"), *((v, f"$10^{{{round(math.log10(v))}}}$") for v in _decades(zero * 10, y[1]))]
            axes.set_yticks([v for v, _ in ticks], [label for _, label in ticks])
            axes.minorticks_off()
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlim=x, ylim=y, xlabel="step", ylabel=panel.y_label)
    axes.legend(frameon=False, fontsize=8, ncols=2)


def _decades(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    stride = max(1, -(-(last - first + 1) // 6))
    return [10.0**e for e in range(first, last + 1, stride)]
