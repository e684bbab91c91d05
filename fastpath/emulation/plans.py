"""Planned launches compiled for gfx942 and executed: what `fastpath.backend.launch` calls under RLK_EMULATE=gfx942."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastpath.backend import Plan
from fastpath.emulation.launch import ExecutionError, execute_plan
from fastpath.machine_code.check import identity
from fastpath.machine_code.code import Code, compile_plan

_compiled: dict[Any, Code] = {}
#: SHA-256 of executed code -> instructions that it executed.
executed: Counter[str] = Counter()


def code_of(plan: Plan) -> Code:
    """The launch's code, compiled once for all launches that Triton would compile alike."""
    key = identity(plan)
    if key not in _compiled:
        _compiled[key] = compile_plan(plan)
    return _compiled[key]


def execute(plan: Plan, grid: tuple[int, ...]) -> bytes:
    """Execute a launch on tensors of the CPU, and once more with the last wavefront first; returns its code.

    Raises:
        ExecutionError: a fault, a race, or results that depend on the order of the wavefronts.
    """
    code = code_of(plan)
    done = execute_plan(code, plan.arguments, grid)
    executed[code.sha256] += done.instructions
    return code.binary


__all__ = ["ExecutionError", "code_of", "execute", "executed"]
