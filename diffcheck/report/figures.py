"""The figures of a verdict's page. Each is drawn for a desktop's and for a phone's width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from diffcheck.localize.compare import Histogram
from diffcheck.localize.verdict import BoundaryResult
from diffcheck.report.charts import Plot, Scale, heat_map, span, svg, tag, text
from diffcheck.report.folding import layer_of, within_layer
from diffcheck.report.measure import Measured, Tokens
from diffcheck.report.page import both_widths, brief

#: Columns of a heat map and marks of a plot; more are joined, the largest of each group standing for it.
_MOST_COLUMNS, _MOST_TOKENS = 160, 700
#: Bars of a histogram that there is always room for: those of bfloat16.
_LEAST_CLASSES = 17
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def ulp_histogram(counts: Sequence[int] | npt.NDArray[np.int64]) -> Markup:
    """Elements by distance, a bar a power of two, on a logarithmic axis."""
    bars = [(float(k), float(n)) for k, n in enumerate(counts)]

    def at(width: int) -> Markup:
        ticks = [(float(k), _class_name(k)) for k in range(len(bars))]
        _, high = span([n for _, n in bars], log=True)
        plot = Plot(
            width,
            210,
            (-0.6, max(_LEAST_CLASSES, len(bars)) - 0.4),
            (0.5, high),
            x_label="distance in ulp, from this value up to the next",
            y_label="elements",
            x_ticks=ticks,
            log_y=True,
        )
        plot.bars(bars[:1], 0.72, series=1)
        plot.bars(bars[1:], 0.72, series=2)
        return plot.svg("Elements by distance in ulp")

    return both_widths(at)


def _class_name(k: int) -> str:
    """The least distance in class ``k``."""
    if k == 0:
        return "0"
    return f"{2 ** (k - 1)}" if k < 11 else f"2{str(k - 1).translate(_SUPERSCRIPTS)}"


def sparkline(histograms: Sequence[Histogram], classes: int) -> Markup:
    """A histogram as small as a word: the differing elements of one or several boundaries, a bar a power of two."""
    step, height = 5.0, 16.0
    every = np.sum([h.counts for h in histograms], axis=0)
    counts = every[1 : classes + 1]
    top = np.log10(max(10, int(every.sum())))
    bars = []
    for k, n in enumerate(counts.tolist()):
        if n:
            tall = max(1.0, height * float(np.log10(n) + 0.3) / (float(top) + 0.3))
            bars.append(tag("rect", x=k * step, y=height - tall, width=step - 1, height=tall, class_="bar s2"))
    base = tag("line", x1=0, x2=classes * step, y1=height + 0.5, y2=height + 0.5, class_="grid")
    words = ", ".join(f"{n} of {_class_name(k + 1)} ulp" for k, n in enumerate(counts.tolist()) if n)
    return svg(classes * step, height + 1, words, base, *bars)


def status_map(results: Sequence[BoundaryResult], width: int) -> Markup:
    """Operators x layers: a mark a boundary, whose shape tells the status."""
    inside = [r for r in results if layer_of(r.name) is not None]
    names = list(dict.fromkeys(within_layer(r.name) for r in inside))
    layers = list(dict.fromkeys(layer_of(r.name) for r in inside))
    left, row = 8 + 6.6 * max((len(_short(n)) for n in names), default=0), 16.0
    step = min(22.0, (width - left) / max(1, len(layers)))
    found = {r.name: r for r in inside}
    body: list[Markup] = []
    every = max(1, -(-len(layers) * 22 // int(width - left)))
    for j, layer in enumerate(layers):
        if j % every == 0:
            body.append(text(left + (j + 0.5) * step, 11, layer, "middle"))
    for i, name in enumerate(names):
        y = 18 + i * row
        body.append(text(left - 6, y + 11, _short(name), "end", "code"))
        for j, layer in enumerate(layers):
            result = found.get(f"layers.{layer}.{name}")
            if result is not None:
                body.append(status_mark(result.status, left + (j + 0.5) * step, y + 7.5, min(step, row) - 2))
    label = "Status of every boundary by layer; the table of boundaries holds the same"
    return svg(left + step * len(layers), 20 + row * len(names), label, *body)


def _short(name: str) -> str:
    return name.removeprefix("self_attn.").removeprefix("mlp.")


def status_mark(status: str, x: float, y: float, size: float) -> Markup:
    """The sign of a status around (x, y): a dot, a full square, an open one with a diagonal, a cross."""
    half = size / 2
    side = min(size, 10.0)
    left, top = x - side / 2, y - side / 2
    match status:
        case "equal":
            shape = tag("circle", cx=x, cy=y, r=min(2.2, half * 0.4))
        case "unobserved":
            r = min(3.5, half * 0.6)
            shape = tag("path", d=f"M{x - r:g} {y - r:g}l{2 * r:g} {2 * r:g}m0 {-2 * r:g}l{-2 * r:g} {2 * r:g}")
        case "receiver":
            shape = tag("path", d=f"M{left:g} {top:g}h{side:g}v{side:g}h{-side:g}zm0 {side:g}l{side:g} {-side:g}")
        case _:
            shape = tag("rect", x=left, y=top, width=side, height=side)
    return tag("g", shape, class_=f"sign {status}")


def position_map(measured: Measured) -> tuple[Markup, str]:
    """Layer x position: how far the residual stream is apart, the farthest sample standing for all; and the caption.
    No drawing where nothing differs, or no layer was seen.
    """
    if measured.rows is None or not measured.layers:
        return Markup(""), "What the layers hand on was not seen on both sides."
    if not any(layer.distance.any() for layer in measured.layers):
        return Markup(""), "What each layer hands on is equal in every bit."
    positions = int(measured.rows.position.max()) + 1
    group = -(-positions // _MOST_COLUMNS)
    columns = -(-positions // group)
    at = measured.rows.position // group
    raw = []
    many = len(measured.layers) > 16
    for layer in measured.layers:
        cells = np.zeros(columns)
        # A row that differs by an unknown amount counts as the farthest of all.
        np.maximum.at(cells, at[: layer.distance.size], np.where(np.isnan(layer.distance), np.inf, layer.distance))
        # Low rows have room for every second number.
        crowded = many and layer.label.isdigit() and int(layer.label) % 2
        raw.append(("" if crowded else layer.label, cells))
    known = [float(c) for _, cells in raw for c in cells if 0 < c < np.inf]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    low = min(low, high / 10)
    scale = np.log10(high / low)
    rows = [(label, [_share(c, low, scale) for c in cells.tolist()]) for label, cells in raw]
    ticks = [(int(p) // group, label) for p, label in Scale(0, positions - 1, 0, 1).ticks(8) if p == int(p)]
    drawn = both_widths(
        lambda width: heat_map(
            rows,
            width,
            "Relative distance by layer and position",
            x_label="position in the sample",
            x_ticks=ticks,
            row_height=11 if many else 18,
        )
    )
    if not known:
        sizes = "The traces hold digests only: a full cell differs, by how much is not known."
    else:
        sizes = (
            f"Palest {brief(low, 2)}, strongest {brief(high, 2)}, on a logarithmic scale; paper is equal in every bit."
        )
    joined = f" Each column joins {group} positions." if group > 1 else ""
    what = "|left − right| / |left| (2-norm of a row) of what each layer hands on; of all samples the farthest."
    return drawn, f"{what} {sizes}{joined}"


def _share(distance: float, low: float, scale: float) -> float:
    """Where a distance lies between the smallest and the largest, on a logarithmic scale."""
    if distance == 0:
        return 0.0
    return 1.0 if distance == np.inf else max(0.02, float(np.log10(max(distance, low) / low) / scale))


def token_plot(tokens: Tokens) -> Markup:
    """|left - right| of every response token's logprob, on a logarithmic axis, samples side by side."""
    gap = tokens.difference
    group = -(-gap.size // _MOST_TOKENS)
    joined = [float(np.max(gap[i : i + group])) for i in range(0, gap.size, group)]
    low, high = span([g for g in joined if np.isfinite(g)], log=True)
    starts = np.flatnonzero(np.diff(tokens.rows.sample, prepend=-1)).tolist()
    middles = [(a + b) / 2 / group for a, b in zip(starts, [*starts[1:], gap.size], strict=True)]

    def at(width: int) -> Markup:
        plot = Plot(
            width,
            230,
            (-1.0, len(joined)),
            (low, high),
            x_label="response tokens, by sample",
            y_label="|Δ logprob| in nats",
            x_ticks=[(m, str(i)) for i, m in enumerate(middles)],
            log_y=True,
        )
        for start in starts[1:]:
            x = plot.x(start / group - 0.5)
            plot.add(tag("line", x1=x, x2=x, y1=plot.y.start, y2=plot.y.end, class_="grid"))
        plot.dots([(i, g) for i, g in enumerate(joined) if 0 < g < np.inf], 2, "differs")
        equal = [(i, low) for i, g in enumerate(joined) if g == 0]
        plot.dots(equal, 1, "equal in every bit, drawn on the axis" if equal else "", hollow=True)
        infinite = [(i, high) for i, g in enumerate(joined) if not np.isfinite(g)]
        plot.dots(infinite, 5, "infinite or NaN, drawn at the top" if infinite else "", hollow=True)
        return plot.svg("Difference of each response token's logprob")

    return both_widths(at)


def classes_in_use(histograms: Mapping[str, Histogram]) -> int:
    """Bars that every sparkline of a table needs, so that they share an axis."""
    return max((h.used.size - 1 for h in histograms.values()), default=1)
