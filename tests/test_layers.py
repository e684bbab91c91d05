"""Imports point only downwards, and the specification needs no engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Top floor first.
LAYERS = ("integration", "diffcheck", "fastpath", "reference")
#: What a layer may not import at all, not even inside a function.
FORBIDDEN = {"reference": {"torch", "triton", "vllm", "megatron", "transformers"}, "fastpath": {"vllm", "megatron"}}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downwards(layer: str) -> None:
    above = set(LAYERS[: LAYERS.index(layer)]) | {"tests"}
    for path in (ROOT / layer).rglob("*.py"):
        # A benchmark runs the peers it names; what is measured does not.
        barred = above if "benchmarks" in path.parts else above | FORBIDDEN.get(layer, set())
        assert not (found := barred & set(imports(path))), f"{path.relative_to(ROOT)} imports {found}"
