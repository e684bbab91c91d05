"""The notebooks run from top to bottom, use the public API only, and are committed as they ran."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: Those that start real engines.
WITH_ENGINES = {"engines"}
LARGEST = 200_000


def parameters() -> list[object]:
    return [
        pytest.param(path, marks=[pytest.mark.engines] if path.stem in WITH_ENGINES else [], id=path.stem)
        for path in NOTEBOOKS
    ]


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def test_none_is_missing() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["contract", "engines", "faults", "grpo"]


@pytest.mark.parametrize("path", parameters())
def test_a_notebook_runs(path: Path) -> None:
    notebook = read(path)
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    figures = [o for o in outputs(notebook) if "image/png" in o.get("data", {})]
    assert figures, "a notebook shows plots"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_ran(path: Path) -> None:
    notebook = read(path)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run it from top to bottom and save it"
    assert all(o.output_type != "error" for o in outputs(notebook))
    assert path.stat().st_size < LARGEST
    shown = "".join(o.get("text", "") for o in outputs(notebook))
    assert not re.search(r"/(home|root|tmp|usr)/", shown), "no path of somebody's machine"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_nothing_private(path: Path) -> None:
    for cell in read(path).cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                parts = [p for n in (*names, *(a.name for a in node.names)) for p in n.split(".")]
                assert not [p for p in parts if p.startswith("_") and p != "__future__"], ast.unparse(node)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
