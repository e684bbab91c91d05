"""Which small changes of the code no test notices: ``python -m tests.mutations [MODULE ...] [--every N]``.

A mutant is the module with one operator, comparison, condition, number or statement changed. It is imported in a forked
process in place of the module, where the module's own tests run; a mutant that passes them survives, and is printed.
Docstrings, annotations, messages and `__all__` are left alone. Results are in docs/mutations.md.
"""

from __future__ import annotations

import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

ROOT = Path(__file__).parent.parent
#: Seconds after which a mutant counts as killed: it loops.
LIMIT = 120

_OPERATORS = "tests/reference/operators"
#: Modules of operators that are tested under another name.
_NAMES = {"_online_softmax": "attention", "_attention_contract": "attention"}
#: What tests all of a folder's modules, where none bears a module's name.
_SHARED = {
    "reference/operators": (
        "tests/reference/vectors",
        "tests/reference/test_zero_rows.py",
        "tests/reference/contract/test_contract.py",
        "tests/reference/contract/test_contract_fields.py",
    ),
    "reference/reductions": ("tests/reference/reductions", "tests/reference/test_zero_rows.py"),
    "reference/primitives": ("tests/reference/primitives",),
    "reference/contract": ("tests/reference/contract/test_contract.py",),
    "reference/dot": ("tests/reference/dot/test_dot.py", "tests/reference/dot/test_dot_memory.py"),
    "reference/models": ("tests/reference/models",),
    "reference": ("tests/reference/test_arithmetic.py", "tests/reference/test_formats.py", _OPERATORS),
    "diffcheck/localize": (
        "tests/diffcheck/localize/test_localize.py",
        "tests/diffcheck/localize/test_alignment.py",
        "tests/diffcheck/trace/test_joined.py",
    ),
    "integration/grpo/buffer": ("tests/integration/grpo/test_buffer.py",),
    "integration/grpo/mismatch": (
        "tests/integration/grpo/test_metrics.py",
        "tests/integration/grpo/test_metric_names.py",
    ),
    "integration/grpo/tasks": ("tests/integration/grpo/test_tasks.py",),
    "integration/grpo/workers": ("tests/integration/grpo/test_weights.py",),
    "integration/grpo": ("tests/integration/grpo/test_config.py", "tests/integration/grpo/test_weights.py"),
}
_SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Not: ast.UAdd, ast.USub: ast.UAdd, ast.Invert: ast.UAdd,
}  # fmt: skip


def mutants(source: str) -> Iterator[tuple[int, str, ast.Module]]:
    """(line, what was changed, the changed module) of every mutant."""
    tree = ast.parse(source)
    for number, (node, change, words) in enumerate(_sites(tree)):
        del node, change
        changed = copy.deepcopy(tree)
        target, apply, _ = list(_sites(changed))[number]
        apply()
        yield target.lineno, words, ast.fix_missing_locations(changed)


def _sites(tree: ast.Module) -> Iterator[tuple[Any, Callable[[], None], str]]:
    """Every place that can be changed: the node, the change, and both in words."""
    skipped = set(_left_alone(tree))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp | ast.UnaryOp):
            if type(node.op) in _SWAPS:
                yield node, _swap(node), f"{ast.unparse(node)}: {type(node.op).__name__} changed"
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
            yield node, _swap(node), f"{ast.unparse(node)}: {type(node.ops[0]).__name__} changed"
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node, _negate(node), f"condition {ast.unparse(node.test)} negated"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            yield node, _other(node), f"{node.value!r} changed"
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield node, _drop(tree, node), f"dropped: {ast.unparse(node)[:80]}"


def _left_alone(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        for part in _parts_left_alone(node):
            if part is not None:
                yield from ast.walk(part)


def _parts_left_alone(node: ast.AST) -> Sequence[ast.AST | None]:
    match node:
        case ast.AnnAssign():
            return (node.annotation,)
        case ast.FunctionDef():
            return (node.returns, *(argument.annotation for argument in node.args.args), *node.decorator_list)
        case ast.JoinedStr() | ast.Raise():
            return tuple(ast.iter_child_nodes(node))
        case ast.If() if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            return (node,)
        case ast.Assign() if ast.unparse(node.targets[0]) in ("__all__", "Tensor", "Group"):
            return (node,)
    return ()


def _swap(node: Any) -> Callable[[], None]:
    def change() -> None:
        if isinstance(node, ast.Compare):
            node.ops[0] = _SWAPS[type(node.ops[0])]()
        else:
            node.op = _SWAPS[type(node.op)]()

    return change


def _negate(node: Any) -> Callable[[], None]:
    def change() -> None:
        node.test = ast.UnaryOp(ast.Not(), node.test)

    return change


def _other(node: ast.Constant) -> Callable[[], None]:
    def change() -> None:
        value: Any = node.value
        node.value = not value if isinstance(value, bool) else value + 1

    return change


def _drop(tree: ast.Module, statement: ast.stmt) -> Callable[[], None]:
    def change() -> None:
        for parent in ast.walk(tree):
            for body in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(body, list) and statement in body:
                    body[body.index(statement)] = ast.copy_location(ast.Pass(), statement)

    return change


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed syntax tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        is_package = self._path.name == "__init__.py"
        spec = importlib.util.spec_from_loader(fullname, self, origin=str(self._path), is_package=is_package)
        if spec is not None and is_package:
            spec.submodule_search_locations = [str(self._path.parent)]
        return spec

    def exec_module(self, module: Any) -> None:
        module.__file__ = str(self._path)
        exec(compile(self._tree, str(self._path), "exec"), module.__dict__)


def tests_of(path: Path) -> list[str]:
    """The tests that a module has to answer to: those with its name, and those of its folder."""
    relative = path.relative_to(ROOT)
    name = f"test_{_NAMES.get(path.stem, path.stem)}.py"
    named = [str(found.relative_to(ROOT)) for found in sorted((ROOT / "tests").rglob(name))]
    for folder in relative.parents:
        if str(folder) in _SHARED:
            return list(dict.fromkeys((*named, *_SHARED[str(folder)])))
    return named


def survives(path: Path, tree: ast.Module, tests: Sequence[str]) -> bool:
    """Whether all ``tests`` pass in a process that imports the changed module."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(LIMIT)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            sys.meta_path.insert(0, _Importer(name, path, tree))
            selected = [] if "operators" not in path.parts else ["-k", _about(path.stem)]
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not engines", *selected, *tests]))
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _about(operator: str) -> str:
    """Of the tests that run every operator, those of one."""
    if operator in ("_arguments", "_numerics"):
        return "operators or vectors"
    name = _NAMES.get(operator, operator)
    return f"{operator} or test_{name} or {name}"


def main(
    modules: Annotated[list[Path], typer.Argument(help="Files.")],
    every: Annotated[int, typer.Option(min=1, help="Try one mutant in so many.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="Which one of them.")] = 0,
) -> None:
    """Print every mutant that its tests do not notice, and how many were tried."""
    import numpy as np  # noqa: F401 - once, before the forks
    import torch  # noqa: F401

    os.chdir(ROOT)
    tried = survived = 0
    for path in (module.resolve() for module in modules):
        tests, here = tests_of(path), 0
        for line, words, tree in list(mutants(path.read_text()))[first % every :: every]:
            tried, here = tried + 1, here + 1
            if survives(path, tree, tests):
                survived += 1
                print(f"{path.relative_to(ROOT)}:{line}: {words}", flush=True)
        print(f"# {path.relative_to(ROOT)}: {here} tried", file=sys.stderr, flush=True)
    print(f"# {survived} of {tried} survive", flush=True)


if __name__ == "__main__":
    typer.run(main)
