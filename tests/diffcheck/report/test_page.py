"""The base of all pages: nothing from outside, nothing unescaped, readable on a phone."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from diffcheck.base.errors import InputError
from diffcheck.report.charts import Plot, Scale, heat_map, span, tag
from diffcheck.report.page import both_widths, breakable, render, write_page
from tests.diffcheck.report.browser import DESKTOP, PHONE, needs_browser, scroll_width

EVIL = "<script>alert(1)</script>\"'&"


def plot(width: int) -> Markup:
    drawn = Plot(width, 200, (0, 10), (1e-6, 1), x_label="step", y_label=EVIL, log_y=True)
    drawn.line([(0, 1e-3), (1, math.nan), (2, 0.0), (3, 1e-1), (4, 1)], 2, EVIL)
    drawn.dots([(3, 1e-2)], hollow=True)
    drawn.bars([(5, 1e-2)], 0.8)
    return drawn.svg(EVIL)


def page() -> str:
    return render("page.html.j2", title=EVIL)


def test_a_page_takes_nothing_from_outside() -> None:
    text = page()
    assert "default-src 'none'" in text and "<script" not in text
    assert not re.search(r"https?://|url\(|@import|<link|src=", text)


def test_text_is_escaped() -> None:
    assert "<script>alert" not in page() and "&lt;script&gt;alert" in page()
    for drawn in (plot(350), tag("text", EVIL, class_=EVIL), breakable(EVIL)):
        assert "<script>" not in drawn and "&lt;script&gt;" in drawn


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="title"):
        render("page.html.j2")


def test_writing_is_refused_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-such-folder"):
        write_page(tmp_path / "no-such-folder" / "page.html", "page.html.j2", title="x")
    write_page(tmp_path / "page.html", "page.html.j2", title="x")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_names_break_after_dots_and_underscores() -> None:
    assert breakable("layers.0.q_proj") == "layers.<wbr>0.<wbr>q_<wbr>proj"


def test_ticks_are_round_and_inside() -> None:
    assert [t for t, _ in Scale(0, 10, 0, 1).ticks(5)] == [0, 2, 4, 6, 8, 10]
    assert [label for _, label in Scale(1e-4, 10, 0, 1, log=True).ticks(6)] == [
        "1e-4",
        "1e-3",
        "0.01",
        "0.1",
        "1",
        "10",
    ]
    assert Scale(3, 3, 0, 1).ticks(5) == [(3, "3")]
    for low, high in ((0, 1e-9), (-7, 13), (0, 123456), (1, 2)):
        ticks = [t for t, _ in Scale(low, high, 0, 1).ticks(5)]
        assert 2 <= len(ticks) <= 7 and low <= ticks[0] and ticks[-1] <= high * (1 + 1e-9)


def test_limits_hold_all_finite_values() -> None:
    assert span([1, 2, math.nan, math.inf]) == (0, 2.1)
    assert span([]) == span([0.0]) == (0.0, 1.0)
    assert span([2e-5, 0.3, 0.0], log=True) == (1e-5, 1.0)
    low, high = span([1.0], log=True)
    assert low <= 1.0 < high


def test_a_line_breaks_where_there_is_no_value() -> None:
    (path,) = re.findall(r'<path d="([^"]*)"', plot(350))
    assert path.count("M") == 2 and path.count("L") == 1


def test_layers_of_a_stack_join_their_neighbours() -> None:
    drawn = Plot(162, 162, (0.5, 2.5), (0, 4), x_label="x", y_label="y")
    drawn.band([(1, 0, 1), (2, 1, 3)], 2, "layer")
    text = drawn.svg("stack")
    # 50 pixels a step, 25 a unit of y.
    assert 'd="M52 99L102 99L102 49L152 49L152 99L102 99L102 124L52 124Z" class="bar s2"' in text.replace(".00", "")
    assert "layer</span>" in text


def test_a_heat_map_draws_no_cell_for_zero_and_a_line_for_unseen() -> None:
    drawn = heat_map([("a", [0.0, 0.5, 0.5, None])], 300, "label", x_label="x", x_ticks=[(0, "0")])
    assert drawn.count('class="heat"') == 1 and drawn.count('class="grid"') == 1


@needs_browser
def test_no_page_scrolls_sideways() -> None:
    inside = Markup('<div class="scroll"><table><tr><td>{}</td></tr></table></div>').format("wide" * 400)
    text = page().replace("<main>", f"<main>{both_widths(plot)}{inside}")
    assert scroll_width(text, PHONE) == PHONE and scroll_width(text, DESKTOP) == DESKTOP
    assert scroll_width(text.replace('class="scroll"', ""), PHONE) > PHONE


def test_labels_of_an_axis_do_not_touch() -> None:
    ticks = [(0.0, "0"), (0.1, "1"), (0.2, "2"), (5.0, "50000"), (5.5, "55"), (9.0, "9")]
    drawn = Plot(350, 200, (0, 10), (0, 1), x_label="x", y_label="y", x_ticks=ticks).svg("label")
    assert re.findall(r'text-anchor="middle">([^<]*)<', drawn) == ["0", "50000", "9"]
