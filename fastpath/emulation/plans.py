"""Planned launches compiled for gfx942 and executed: what `fastpath.backend.launch` calls under RLK_EMULATE=gfx942."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

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
    """Execute a launch on tensors of the CPU; again with the last wavefront first, and with every hardware
    approximation one unit in the last place off either way. Returns its code.

    Raises:
        ExecutionError: a fault, a race, or bits that depend on the order of wavefronts or on an approximation.
    """
    code = code_of(plan)
    memory = _memory(plan)
    before = [region.clone() for region in memory]
    done = execute_plan(code, plan.arguments, grid)
    executed[code.sha256] += done.instructions
    after = [region.clone() for region in memory]
    for approximate, descending in ((1, True), (-1, False)) if done.approximations else ((0, True),):
        for region, start in zip(memory, before, strict=True):
            region.copy_(start)
        execute_plan(code, plan.arguments, grid, approximate=approximate, descending=descending)
        if not all(torch.equal(region, end) for region, end in zip(memory, after, strict=True)):
            raise ExecutionError(
                f"{code.kernel}: other bits with wavefronts {'descending' if descending else 'ascending'} and "
                f"approximations {approximate:+d} unit in the last place off"
            )
    return code.binary


def _memory(plan: Plan) -> list[torch.Tensor]:
    """The bytes of everything that a launch can write."""
    storages = {
        value.data_ptr(): value.untyped_storage() for value in plan.arguments if isinstance(value, torch.Tensor)
    }
    distinct = {storage.data_ptr(): storage for storage in storages.values() if storage.nbytes()}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in distinct.values()]


__all__ = ["ExecutionError", "code_of", "execute", "executed"]
