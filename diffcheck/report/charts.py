"""Figures as SVG text: drawn by hand so that they follow the page's colours, light or dark, and need no library:
matplotlib writes colours into its SVG, where a style sheet cannot reach them. Both pages draw with this.

Sizes are CSS pixels. Nothing is told by colour alone: lines differ in dashes, marks in shape, and both bear a label.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from diffcheck.report.page import brief

#: Dashes of the six series, in the order of the style sheet's ``s1`` to ``s6``.
_DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3", "12 4")
#: Steps of a linear axis, times a power of ten.
_STEPS = (1, 2, 2.5, 5, 10)


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """An element, closed at once where it is empty, as SVG's may be; ``content`` is escaped unless it is Markup.

    ``class_`` and ``stroke_width`` lose or turn their underscore; numbers are cut to a hundredth of a pixel; attributes
    that are None are left out.
    """
    parts = []
    for key, value in attributes.items():
        if value is not None:
            text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
            parts.append(Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), text))
    head = Markup("").join((Markup(name), *parts))
    if not content:
        return Markup("<{}/>").format(head)
    return Markup("<{}>{}</{}>").format(head, Markup("").join(escape(c) for c in content), Markup(name))


def svg(width: float, height: float, label: str, *content: Markup) -> Markup:
    """A drawing of that size; ``label`` says in words what it shows."""
    return tag(
        "svg", *content, viewBox=f"0 0 {width:g} {height:g}", width=width, height=height, role="img", aria_label=label
    )


def text(x: float, y: float, words: object, anchor: str = "start", class_: str | None = None) -> Markup:
    """A line of text whose baseline is at ``y``."""
    return tag("text", words, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_)


@dataclass(frozen=True)
class Scale:
    """Data from ``low`` to ``high`` on pixels from ``start`` to ``end``, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, v = map(math.log10, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (self.end - self.start) * (v - low) / ((high - low) or 1.0)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """At most about ``most`` (value, label): round numbers, or powers of ten."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            stride = max(1, math.ceil((last - first + 1) / most))
            return [(10.0**e, brief(10.0**e) if -3 < e < 4 else f"1e{e}") for e in range(first, last + 1, stride)]
        if self.high <= self.low:
            return [(self.low, brief(self.low))]
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(s * power for s in _STEPS if s * power >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(i * step, f"{i * step:.6g}") for i in range(first, last + 1)]


def span(values: Iterable[float], log: bool = False) -> tuple[float, float]:
    """Limits of an axis for ``values``: from 0 (or below) to a little above the largest; with ``log`` whole decades
    around the positive ones. What is not finite does not count.
    """
    seen = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if log:
        low, high = (min(seen), max(seen)) if seen else (0.1, 1.0)
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return 10.0**first, 10.0 ** max(last, first + 1)
    low, high = min(0.0, *seen, 0.0), max(0.0, *seen, 0.0)
    return (low * 1.05, high * 1.05) if high > low else (0.0, 1.0)


class Plot:
    """Axes, and what is drawn on them.

    Args:
        width, height: of the whole drawing.
        x, y: (lowest, highest) of the data; padded by nothing.
        x_ticks: (value, label) in place of round numbers, ascending; one that would touch the last is left out.
        log_y: a logarithmic axis; both ends must be positive.
    """

    _LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 24, 38

    def __init__(
        self,
        width: int,
        height: int,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        x_label: str,
        y_label: str,
        x_ticks: Sequence[tuple[float, str]] | None = None,
        y_ticks: Sequence[tuple[float, str]] | None = None,
        log_y: bool = False,
    ) -> None:
        self.width, self.height = width, height
        self.x = Scale(*x, self._LEFT, width - self._RIGHT)
        self.y = Scale(*y, height - self._BOTTOM, self._TOP, log_y)
        self._body: list[Markup] = []
        self._legend: list[Markup] = []
        self._draw_axes(x_label, y_label, x_ticks, y_ticks)

    def _draw_axes(
        self,
        x_label: str,
        y_label: str,
        x_ticks: Sequence[tuple[float, str]] | None,
        y_ticks: Sequence[tuple[float, str]] | None,
    ) -> None:
        left, right, bottom = self.x.start, self.x.end, self.y.start
        for value, label in self.y.ticks(5) if y_ticks is None else y_ticks:
            at = self.y(value)
            self.add(tag("line", x1=left, x2=right, y1=at, y2=at, class_="grid"), text(left - 7, at + 4, label, "end"))
        end = -math.inf
        for value, label in self.x.ticks(max(2, self.width // 90)) if x_ticks is None else x_ticks:
            half = 3.5 * len(label)
            if self.x(value) - half > end + 6:
                self.add(text(self.x(value), bottom + 16, label, "middle"))
                end = self.x(value) + half
        self.add(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
        self.add(text(right, bottom + 33, x_label, "end"), text(0, 12, y_label))

    def add(self, *elements: Markup) -> None:
        """Draw elements in pixel coordinates, over what is there."""
        self._body += elements

    def line(self, points: Iterable[tuple[float, float]], series: int = 1, label: str = "") -> None:
        """A line through (x, y); values that are not finite break it."""
        path, pen = [], "M"
        for x, y in points:
            if math.isfinite(x) and math.isfinite(y) and (y > 0 or not self.y.log):
                path.append(f"{pen}{self.x(x):.2f} {self.y(y):.2f}")
                pen = "L"
            else:
                pen = "M"
        style = {"class_": f"line s{series}", "stroke_dasharray": _DASHES[series - 1] or None}
        self.add(tag("path", d="".join(path), **style))
        if label:
            self._key(label, tag("line", x1=0, x2=22, y1=5, y2=5, **style))

    def dots(
        self, points: Iterable[tuple[float, float]], series: int = 1, label: str = "", hollow: bool = False
    ) -> None:
        """A mark at every (x, y): filled, or a ring."""
        style = f"{'hollow' if hollow else 'mark'} s{series}"
        for x, y in points:
            self.add(tag("circle", cx=self.x(x), cy=self.y(y), r=2.4, class_=style))
        if label:
            self._key(label, tag("circle", cx=11, cy=5, r=2.8, class_=style))

    def bars(self, bars: Iterable[tuple[float, float]], width: float, series: int = 1) -> None:
        """A bar from the axis up to y around every x; ``width`` in units of x."""
        for x, y in bars:
            if self.y.log and y <= 0:
                continue
            left, right, top = self.x(x - width / 2), self.x(x + width / 2), self.y(y)
            shape = {"x": left, "y": top, "width": right - left, "height": max(0.0, self.y.start - top)}
            self.add(tag("rect", **shape, class_=f"bar s{series}"))

    def band(self, steps: Iterable[tuple[float, float, float]], series: int = 1, label: str = "") -> None:
        """A layer of a stack: (x, bottom, top) at x one apart, each as wide as the distance to the next."""
        upper, lower = [], []
        for x, bottom, top in steps:
            for edge in (x - 0.5, x + 0.5):
                upper.append(f"{self.x(edge):.2f} {self.y(top):.2f}")
                lower.append(f"{self.x(edge):.2f} {self.y(bottom):.2f}")
        style = f"bar s{series}"
        self.add(tag("path", d=f"M{'L'.join(upper + lower[::-1])}Z", class_=style))
        if label:
            self._key(label, tag("rect", x=5, y=0, width=12, height=10, class_=style))

    def _key(self, label: str, sample: Markup) -> None:
        drawing = tag("svg", sample, viewBox="0 0 22 10", width=22, height=10, aria_hidden="true")
        self._legend.append(tag("span", drawing, label))

    def svg(self, label: str) -> Markup:
        """The drawing below its legend; ``label`` says in words what it shows."""
        legend = tag("div", *self._legend, class_="key") if self._legend else Markup("")
        return legend + svg(self.width, self.height, label, *self._body)


def heat_map(
    rows: Sequence[tuple[str, Sequence[float | None]]],
    width: int,
    label: str,
    *,
    x_label: str,
    x_ticks: Sequence[tuple[int, str]],
    row_height: int = 12,
) -> Markup:
    """Cells of one hue, the stronger the higher.

    Args:
        rows: (label, cells); a cell is a share from 0 to 1, None where nothing was seen. 0 is drawn as paper.
        x_ticks: (column, label).
    """
    left, top = 8 + 7.0 * max((len(name) for name, _ in rows), default=0), 4
    columns = max((len(cells) for _, cells in rows), default=0)
    step = (width - left) / max(1, columns)
    bottom = top + row_height * len(rows)
    body: list[Markup] = [
        tag("rect", x=left, y=top, width=float(width - left), height=bottom - top, class_="nothing"),
    ]
    for i, (name, cells) in enumerate(rows):
        y = top + i * row_height
        body.append(text(left - 6, y + row_height - 3, name, "end"))
        for start, stop, share in _runs(cells):
            shape = {"x": left + start * step, "y": y, "width": (stop - start) * step, "height": row_height - 1}
            if share is None:
                middle = y + row_height / 2
                body.append(
                    tag("line", x1=shape["x"], x2=shape["x"] + shape["width"], y1=middle, y2=middle, class_="grid")
                )
            elif share > 0:
                body.append(tag("rect", **shape, class_="heat", fill_opacity=round(0.12 + 0.88 * min(1.0, share), 2)))
    for column, words in x_ticks:
        body.append(text(left + (column + 0.5) * step, bottom + 15, words, "middle"))
    body.append(text(width, bottom + 31, x_label, "end"))
    return svg(width, bottom + 36, label, *body)


def _runs(cells: Sequence[float | None]) -> Iterable[tuple[int, int, float | None]]:
    """(start, stop, value) of neighbouring cells that look the same: fewer elements for the browser."""
    start = 0
    shown = [None if c is None else round(c, 2) if c else 0.0 for c in cells]
    for i in range(1, len(shown) + 1):
        if i == len(shown) or shown[i] != shown[start]:
            yield start, i, shown[start]
            start = i
