"""The drawing of the graph: every boundary is in it, once, with its status."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest

from diffcheck.base.boundaries import Boundary, graph
from diffcheck.localize.verdict import BoundaryResult, Status
from diffcheck.report.dataflow import draw
from diffcheck.report.figures import status_map, status_mark
from tests.diffcheck.synthetic import CONFIG


def results(nodes: list[Boundary], **status: Status) -> list[BoundaryResult]:
    """All equal but for what ``status`` names, dots written as two underscores."""
    named = {name.replace("__", "."): s for name, s in status.items()}
    return [BoundaryResult(n.name, named.get(n.name, "equal"), 100, 5, 0.5, 3, 2, 1) for n in nodes]


def titles(drawing: str) -> list[str]:
    """The names that the drawing's boxes bear."""
    return [title.split(":")[0] for title in re.findall(r"<title>([^<]*)</title>", drawing)]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_layer_in_full_shows_each_of_its_boundaries_once(tensor_parallel: int, qk_norm: bool) -> None:
    nodes = graph(replace(CONFIG, qk_norm=qk_norm, num_key_value_heads=2), tensor_parallel)
    drawing = draw(nodes, results(nodes, layers__1__mlp__act="origin"), 430)
    full = [n.name for n in nodes if n.layer == 1]
    assert titles(drawing) == ["embed_tokens", "layer 0", *_in_drawn_order(full, drawing), *_after_the_layers(nodes)]
    assert drawing.count('class="box origin"') == 1
    edges = sum(len(n.inputs) for n in nodes if n.layer == 1)
    assert len(re.findall(r'class="edge"', drawing)) >= edges


def _in_drawn_order(names: list[str], drawing: str) -> list[str]:
    return sorted(names, key=lambda name: drawing.index(f"<title>{name}:"))


def _after_the_layers(nodes: list[Boundary]) -> list[str]:
    return [n.name for n in nodes if n.layer is None][1:]


def test_of_many_layers_one_is_drawn_and_the_others_are_folded_by_status() -> None:
    nodes = graph(replace(CONFIG, num_hidden_layers=36))
    found = results(nodes, layers__4__input_layernorm="origin", layers__9__mlp__act="origin")
    for r in found:
        if r.status == "equal" and r.name.startswith(("layers.5.", "layers.6.", "layers.9.")):
            r.status = "receiver"
    drawing = draw(nodes, found, 350)
    shown = [t for t in titles(drawing) if t.startswith("layer")]
    assert [t for t in shown if not t.startswith("layers.4.")] == [
        "layers 0 to 3",
        "layers 5 to 6",
        "layers 7 to 8",
        "layer 9",
        "layers 10 to 35",
    ]
    assert len(shown) == 5 + 19


def test_an_origin_outside_the_layers_folds_all_of_them() -> None:
    nodes = graph(CONFIG)
    drawing = draw(nodes, results(nodes, norm="origin"), 430)
    assert titles(drawing) == ["embed_tokens", "layers 0 to 1", *_after_the_layers(nodes)]


def test_statuses_differ_by_more_than_colour() -> None:
    nodes = graph(CONFIG)
    found = results(nodes, layers__0__input_layernorm="origin", layers__0__attn_residual="unobserved", norm="receiver")
    drawing = draw(nodes, found, 430)
    assert ">not seen<" in drawing and ">5 %<" in drawing and ">=<" in drawing
    shapes = {status: re.sub(r"sign \w+", "", status_mark(status, 5, 5, 12)) for status in get_args(Status)}
    assert len(set(shapes.values())) == 4
    drawn = re.findall(r'class="sign (\w+)"', status_map(found, 430))
    assert sorted(drawn) == sorted(r.status for r in found if r.name.startswith("layers"))
