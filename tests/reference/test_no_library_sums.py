"""No sum of the reference is left to a library, whose order depends on version, layout and machine."""

import ast
from pathlib import Path

import pytest

import reference

ROOT = Path(reference.__file__).parent
#: Functions and methods that add several floating-point numbers in an order of their own.
LIBRARY_SUMS = {
    "sum",
    "nansum",
    "mean",
    "average",
    "cumsum",
    "dot",
    "vdot",
    "inner",
    "matmul",
    "tensordot",
    "einsum",
    "trace",
}
SPECIFIED = [
    path for path in sorted(ROOT.rglob("*.py")) if not path.relative_to(ROOT).parts[0].startswith("benchmarks")
]


def library_sums(source: str) -> list[str]:
    """Each `a @ b`, and each call of `numpy.<sum>` or of a method of that name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            found.append(f"line {node.lineno}: @")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            # np.add.accumulate is allowed: each partial sum is an output, so it has but one order
            is_reduce = name == "reduce" and ast.unparse(node.func.value).endswith(".add")
            if name in LIBRARY_SUMS or is_reduce:
                found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    return found


@pytest.mark.parametrize("path", SPECIFIED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_sum_is_written_out(path: Path) -> None:
    assert library_sums(path.read_text()) == []


@pytest.mark.parametrize("line", ["np.sum(x)", "x.sum(-1)", "a @ b", "np.add.reduce(x)", "np.einsum('ij,jk', a, b)"])
def test_the_search_finds_each_kind(line: str) -> None:
    assert len(library_sums(line)) == 1
