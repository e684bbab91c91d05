"""Self-contained HTML pages: one file without network, script or foreign font; light and dark, desktop and phone.

A page is a jinja2 template that extends ``page.html.j2`` and uses the macros of ``parts.html.j2``; figures come from
`diffcheck.report.charts`. Text is escaped everywhere: names in traces and models are other people's. Other packages
keep their own templates beside their code and name themselves as ``package``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from diffcheck.base.errors import InputError
from diffcheck.base.files import write_text

try:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape
except ImportError:
    raise InputError("HTML reports need jinja2, which is not installed", "pip install 'rlk[report]'") from None

#: Widths in CSS pixels that figures are drawn for: a desktop's column of text, and a phone's.
WIDE, NARROW = 880, 350


@dataclass(frozen=True)
class Column:
    """A column of a table. ``minor`` ones are left out on a phone."""

    head: str
    kind: Literal["text", "name", "number"] = "text"
    minor: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table: a cell a column, text (escaped) or Markup. ``mark`` is a status that tints it."""

    cells: Sequence[object]
    mark: str = ""


def render(template: str, package: str = "diffcheck.report", **values: Any) -> str:
    """The page as text.

    Args:
        template: name in ``templates/`` of ``package``.
        values: what the template uses; ``title`` is the window's title. A missing one is an error, not an empty text.
    """
    loader = ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, "diffcheck.report"))])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"breakable": breakable, "count": count, "brief": brief}
    return environment.get_template(template).render(Column=Column, Row=Row, **values)


def write_page(path: Path, template: str, package: str = "diffcheck.report", **values: Any) -> None:
    """Render and write atomically.

    Raises:
        InputError: ``path`` cannot be written.
    """
    write_text(path, render(template, package, **values))


def both_widths(draw: Callable[[int], Markup], wide: int = WIDE) -> Markup:
    """A figure drawn for each of the two widths, of which the page shows the one that fits: letters keep their size."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(draw(wide), draw(NARROW))


def breakable(name: object) -> Markup:
    """A dotted name that may break into lines after its dots and underscores."""
    text = str(escape(name))
    for mark in "._/":
        text = text.replace(mark, f"{mark}<wbr>")
    return Markup(text)


#: Characters of a value that is shown whole, and of the piece that stands for a longer one.
_WHOLE, _PIECE = 48, 24


def both_shortened(left: str, right: str) -> tuple[Markup, Markup]:
    """Two values that differ, so that both are read at a glance: of long ones the piece in which they first differ, the
    whole on a click or tap.
    """
    same = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    start = max(0, same - _PIECE // 2) if same > _PIECE // 2 else 0
    return _shortened(left, start), _shortened(right, start)


def _shortened(value: str, start: int) -> Markup:
    if len(value) <= _WHOLE:
        return escape(value)
    piece = value[start : start + _PIECE]
    before, after = "…" * (start > 0), "…" * (start + _PIECE < len(value))
    return Markup("<details><summary>{}{}{}</summary>{}</details>").format(before, piece, after, value)


def count(number: int) -> str:
    """An integer with thousands separated; from a million on, three digits and a power of ten."""
    return f"{number:,}" if abs(number) < 1_000_000 else f"{number:.2e}"


def brief(number: float | None, digits: int = 3) -> str:
    """A float to ``digits`` significant digits, a dash where there is none."""
    return "–" if number is None else f"{number:.{digits}g}"
