"""The dataflow graph as a drawing: one layer in full, the others folded, each boundary marked by its status.

A status shows in the box itself, not only in its colour: equal is an outline, an origin is filled, a receiver is
tinted and bears its size, an unobserved boundary is dashed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from diffcheck.base.boundaries import Boundary
from diffcheck.localize.verdict import BoundaryResult
from diffcheck.report.charts import svg, tag, text
from diffcheck.report.folding import layer_in_full, layer_of, share, short_count, within_layer

#: The rows of a layer's drawing from top to bottom, each a list of columns; ``*`` is a row that has one box only.
_ROWS: tuple[tuple[str, ...], ...] = (
    ("input_layernorm",),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.q_norm", "self_attn.k_norm", ""),
    ("self_attn.q_rope", "self_attn.k_rope", ""),
    ("", "self_attn.k_cache", "self_attn.v_cache"),
    ("self_attn.attention",),
    ("self_attn.o_proj.partial",),
    ("self_attn.o_proj",),
    ("attn_residual",),
    ("post_attention_layernorm",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.act",),
    ("mlp.down_proj.partial",),
    ("mlp.down_proj",),
    ("mlp_residual",),
)
#: Pixels: height of a box, space below it, space between columns, and at the right the lane of the residual stream and
#: the layer's bracket.
_BOX, _GAP, _BETWEEN, _LANE, _BRACKET = 27.0, 13.0, 8.0, 22.0, 20.0
#: Boxes below this width, on a phone, bear shorter words.
_SMALL = 105.0
#: Statuses from the gravest: a folded run of layers bears the gravest of its members.
_GRAVITY = ("origin", "receiver", "unobserved", "equal")
#: Folded boxes before or after the full layer; more are joined into one.
_MOST_FOLDED = 6


@dataclass(frozen=True)
class _Box:
    """Where a box was drawn."""

    x: float
    y: float
    width: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + _BOX

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + _BOX / 2


def draw(nodes: Sequence[Boundary], results: Sequence[BoundaryResult], width: int) -> Markup:
    """The graph of ``nodes``, marked by ``results``, ``width`` pixels wide.

    The layer of the first origin is drawn in full; the first layer where nothing diverges.
    """
    layers = list(dict.fromkeys(n.layer for n in nodes if n.layer is not None))
    full = _full(layers, results)
    picture = _Picture(width, results)
    picture.chain([n for n in nodes if n.layer is None][:1])
    picture.folds([n for n in layers if full is None or n < full])
    if full is not None:
        picture.layer(full, [n for n in nodes if n.layer == full])
        picture.folds([n for n in layers if n > full])
    picture.chain([n for n in nodes if n.layer is None][1:])
    return picture.svg()


def _full(layers: Sequence[int], results: Sequence[BoundaryResult]) -> int | None:
    """The layer to draw in full; none where the first origin is outside the layers."""
    if any(r.status == "origin" for r in results):
        layer = layer_in_full(results)
        return None if layer is None else int(layer)
    return layers[0] if layers else None


class _Picture:
    """Boxes from top to bottom. ``_stream`` is the box that the next one is computed from."""

    def __init__(self, width: int, results: Sequence[BoundaryResult]) -> None:
        self._width = width
        self._results = {r.name: r for r in results}
        self._y = 1.0
        self._stream: _Box | None = None
        #: Edges lie under the boxes.
        self._edges: list[Markup] = []
        self._boxes: list[Markup] = []

    def svg(self) -> Markup:
        label = "Dataflow graph of the boundaries; the table of boundaries holds the same"
        return svg(self._width, self._y - _GAP + 2, label, *self._edges, *self._boxes)

    def chain(self, nodes: Sequence[Boundary]) -> None:
        """Boundaries outside the layers, one below the other."""
        for node in nodes:
            self._follow(self._draw(node.name, self._place(0, 1)))

    def folds(self, layers: Sequence[int]) -> None:
        """A box for every run of layers whose gravest status is the same."""
        runs = [list(run) for _, run in groupby(layers, key=self._gravest)]
        if len(runs) > _MOST_FOLDED:
            runs = [*runs[: _MOST_FOLDED - 1], [n for run in runs[_MOST_FOLDED - 1 :] for n in run]]
        for run in runs:
            self._follow(self._fold(run))

    def layer(self, number: int, nodes: Sequence[Boundary]) -> None:
        """Every boundary of one layer, with the residual stream in a lane at the right."""
        top = self._y
        named = {n.name: n for n in nodes}
        boxes: dict[str, _Box] = {}
        for row in _ROWS:
            present = [(column, f"layers.{number}.{part}") for column, part in enumerate(row)]
            present = [(column, name) for column, name in present if name in named]
            for column, name in present:
                boxes[name] = self._draw(name, self._place(column, len(row)))
            self._y += (_BOX + _GAP) if present else 0.0
        for node in nodes:
            for i, source in enumerate(node.inputs):
                start = boxes.get(source, self._stream)
                # A residual add reads the stream first, then the branch that lies right above it.
                if start is not None and node.operator == "residual_add" and i == 0:
                    self._around(start, boxes[node.name])
                elif start is not None:
                    self._down(start, boxes[node.name])
        self._stream = boxes[nodes[-1].name]
        self._bracket(top, self._stream.bottom, f"layer {number}")

    def _gravest(self, layer: int) -> str:
        present = {r.status for r in self._results.values() if layer_of(r.name) == str(layer)}
        return next(s for s in _GRAVITY if s in present)

    def _place(self, column: int, columns: int) -> _Box:
        inner = self._width - _LANE - _BRACKET
        width = (inner - _BETWEEN * (columns - 1)) / columns
        return _Box(1 + column * (width + _BETWEEN), self._y, width)

    def _follow(self, box: _Box) -> None:
        if self._stream is not None:
            self._down(self._stream, box)
        self._stream = box
        self._y += _BOX + _GAP

    def _down(self, start: _Box, end: _Box) -> None:
        """Straight down in the middle of the narrower box."""
        x = min(start, end, key=lambda box: box.width).middle[0]
        head = f"M{x - 3:g} {end.y - 5:g}l3 5l3 -5"
        self._edges.append(tag("path", d=f"M{x:g} {start.bottom:g}V{end.y:g}{head}", class_="edge"))

    def _around(self, start: _Box, end: _Box) -> None:
        """Out to the right, down the lane and back in."""
        lane, into = self._width - _BRACKET - _LANE / 2, end.middle[1]
        head = f"M{end.right + 5:g} {into - 3:g}l-5 3l5 3"
        path = f"M{start.right:g} {start.middle[1]:g}H{lane:g}V{into:g}H{end.right:g}{head}"
        self._edges.append(tag("path", d=path, class_="edge"))

    def _bracket(self, top: float, bottom: float, label: str) -> None:
        x, middle = self._width - _BRACKET + 4, (top + bottom) / 2
        self._edges.append(tag("path", d=f"M{x:g} {top:g}h4V{bottom:g}h-4", class_="edge"))
        turned = f"translate({x + 15:g} {middle:g}) rotate(-90)"
        self._boxes.append(tag("g", text(0, 0, label, "middle"), transform=turned))

    def _draw(self, name: str, box: _Box) -> _Box:
        """One boundary."""
        result = self._results[name]
        shown = within_layer(name)
        # Three columns leave no room for the module's name; the layer's rows tell attention from MLP anyway.
        shown = shown.removeprefix("self_attn.").removeprefix("mlp.")
        self._boxes.append(_labelled(box, result.status, shown, _size(result, box.width < _SMALL), _title(result)))
        return box

    def _fold(self, layers: Sequence[int]) -> _Box:
        """A stack of layers."""
        box = self._place(0, 1)
        members = [r for r in self._results.values() if layer_of(r.name) in {str(n) for n in layers}]
        counts: Counter[str] = Counter(r.status for r in members)
        words = ", ".join(f"{counts[s]} {s}" for s in _GRAVITY if counts[s])
        name = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        status = next(s for s in _GRAVITY if counts[s])
        behind = tag("path", d=f"M{box.x + 4:g} {box.bottom + 3:g}H{box.right + 3:g}V{box.y + 4:g}", class_="edge")
        self._boxes += [behind, _labelled(box, status, name, words, f"{name}: {words}")]
        return box


def _labelled(box: _Box, status: str, name: str, size: str, title: str) -> Markup:
    shape = tag("rect", x=box.x, y=box.y, width=box.width, height=_BOX, rx=2)
    baseline = box.y + _BOX / 2 + 4
    words = text(box.x + 8, baseline, name, class_="code"), text(box.right - 8, baseline, size, "end")
    return tag("g", tag("title", title), shape, *words, class_=f"box {status}")


def _size(result: BoundaryResult, small: bool) -> str:
    """What differs, in the few letters that a box has room for."""
    if result.status == "equal":
        return "="
    if result.status == "unobserved":
        return "?" if small else "not seen"
    if not small:
        return share(result)
    if result.differing is None or result.differing <= 1:
        return "≠"
    return f"{100 * result.differing / max(1, result.elements):.2g} %"


def _title(result: BoundaryResult) -> str:
    if result.status == "unobserved":
        return f"{result.name}: not observed ({result.reason})"
    if result.status == "equal":
        return f"{result.name}: equal in all {result.elements:,} elements"
    ulp = "" if result.max_ulp is None else f", at most {short_count(result.max_ulp)} ulp"
    rows = f"{result.rows_origin:,} of {result.rows_differing:,} differing rows have equal inputs"
    return f"{result.name}: {result.status}, {share(result)} differ{ulp}; {rows}"
