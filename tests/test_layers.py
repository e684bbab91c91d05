"""Imports point only downwards and in no circle, and the specification needs no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import imports
from tools.imports import LAYERS, ROOT

#: What a layer may not import at all, not even inside a function.
FORBIDDEN = {"reference": {"torch", "triton", "vllm", "megatron", "transformers"}, "fastpath": {"vllm", "megatron"}}
#: More than this is no room but a heap. `reference/operators` is a catalogue: one operator a file.
MOST = 20
CATALOGUES = {"reference/operators"}


def packages(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    return {module.split(".")[0] for module, _ in imports.imported(path)}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downwards(layer: str) -> None:
    above = set(LAYERS[: LAYERS.index(layer)]) | {"tests", "tools"}
    for path in (ROOT / layer).rglob("*.py"):
        # A benchmark runs the peers it names; what is measured does not.
        barred = above if "benchmarks" in path.parts else above | FORBIDDEN.get(layer, set())
        assert not (found := barred & packages(path)), f"{path.relative_to(ROOT)} imports {found}"


def test_no_imports_go_in_a_circle() -> None:
    """Wherever they stand: an import inside a function hides a circle and does not undo it."""
    graph = imports.between_files(imports.files())
    assert not imports.circles(graph)
    assert not imports.circles(imports.between_rooms(graph))


def test_a_circle_would_be_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert imports.circles(graph) == [["b", "c"]]


def test_a_room_has_few_entries() -> None:
    for layer in LAYERS:
        for folder in (ROOT / layer, *(f for f in (ROOT / layer).rglob("*") if f.is_dir())):
            name = folder.relative_to(ROOT).as_posix()
            entries = [e for e in folder.iterdir() if e.suffix == ".py" or (e.is_dir() and any(e.rglob("*.py")))]
            assert len(entries) <= MOST or name in CATALOGUES, f"{name} holds {len(entries)} files"


def test_an_operator_has_one_file_name_everywhere() -> None:
    operators = {path.stem for path in (ROOT / "reference" / "operators").glob("[a-z]*.py")}
    assert len(operators) >= 20
    for name in sorted(operators):
        assert (ROOT / "tests" / "reference" / "operators" / f"test_{name}.py").exists(), name
        kernels = [
            path.parent.name for path in (ROOT / "fastpath").glob(f"*/{name}.py") if path.parent.name != "conformance"
        ]
        assert len(kernels) == 1, (name, kernels)
        for room in kernels:
            assert (ROOT / "tests" / "fastpath" / room / f"test_{name}.py").exists(), name
