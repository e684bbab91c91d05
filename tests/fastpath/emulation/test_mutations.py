"""The executor can fail: mutations that change bits, each caught, and by which check: docs/emulation.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastpath.backend import TARGETS, Plan
from fastpath.emulation import execute_plan
from fastpath.emulation.translate import TranslationError
from fastpath.machine_code.catalogue import contract
from fastpath.machine_code.check import check
from fastpath.machine_code.code import Code, compile_plan
from reference.checks import Float32Array
from reference.formats import FORMATS
from reference.primitives import PRIMITIVES
from reference.reductions.tree import pairs_tree
from reference.rounding import round_to
from tests.fastpath.emulation import mutants

ROWS, BLOCK = 9, 256


@dataclass(frozen=True)
class Mutation:
    """A kernel, what it computes, and which checks see its mutation."""

    name: str
    kernel: Any
    expected: Callable[[Float32Array], Float32Array]
    #: Rule that finds it, or empty: no rule sees it.
    rule: str = ""
    #: ``bits`` differ when executed; or when approximations are ``moved``; or it ``refuses`` an instruction by name.
    executor: str = "bits"
    operator: str = "rms_norm"
    options: dict[str, Any] | None = None


def _chain(x: Float32Array) -> Float32Array:
    from reference.arithmetic import fused_multiply_add

    total = np.zeros(BLOCK, np.float32)
    for row in x.reshape(ROWS, BLOCK):
        total = fused_multiply_add(row.astype(np.float64), row.astype(np.float64), total)
    return total


def _square(x: Float32Array) -> Float32Array:
    return x * x + np.float32(1)


MUTATIONS = (
    Mutation("tl.fma where the contract multiplies, then adds", mutants.multiply_add, _square),
    Mutation("a polynomial's coefficient changed", mutants.exponential, PRIMITIVES["exp"]["rlk"]),
    Mutation("a Newton step dropped", mutants.inverse_root, lambda x: PRIMITIVES["rsqrt"]["rlk"](x)),
    Mutation("a sum tree in another order", mutants.row_sum, lambda x: pairs_tree(x.reshape(ROWS, BLOCK))),
    Mutation("a truncating bfloat16 cast", mutants.to_bfloat16, lambda x: round_to(x, FORMATS["bfloat16"])),
    Mutation("a wrong mask", mutants.copy, lambda x: x),
    Mutation("a descending K loop", mutants.chain, _chain),
    Mutation(
        "a float atomic addition",
        mutants.sum_of_rows,
        lambda x: pairs_tree(x.reshape(ROWS, BLOCK)),
        rule="no-float-atomics",
    ),
    Mutation(
        "v_rcp_iflag_f32", mutants.reciprocal, lambda x: np.float32(1) / x, rule="no-approximation", executor="moved"
    ),
    Mutation("v_exp_f16", mutants.half_exponential, lambda x: x, rule="no-approximation", executor="refuses"),
    Mutation(
        "a contraction beside a division of int64",
        mutants.beside_division,
        _square,
        rule="no-contraction",
        operator="residual_add",
        options={"enable_fp_fusion": True},
    ),
)


def compiled(mutation: Mutation, mutated: bool, x: torch.Tensor, out: torch.Tensor, n: int) -> tuple[Code, Plan]:
    target = TARGETS["gfx942"]
    options = {"num_warps": 4, **target.options, **((mutation.options or {}) if mutated else {})}
    of = contract(mutation.operator, "float32")
    plan = Plan(mutation.kernel, (x, out, n), {"BLOCK": BLOCK, "MUTATED": mutated}, options, of, target)
    return compile_plan(plan), plan


def differing(mutation: Mutation, mutated: bool, **how: Any) -> tuple[int, set[str]]:
    """Values that differ from the reference when executed, and the rules that the code breaks."""
    given = np.random.default_rng(1).standard_normal(ROWS * BLOCK).astype(np.float32)
    if mutation.kernel in (mutants.inverse_root, mutants.reciprocal):
        given = np.abs(given) + np.float32(0.01)
    by_row = mutation.kernel in (mutants.row_sum, mutants.sum_of_rows)
    size = BLOCK if mutation.kernel is mutants.chain else ROWS if by_row else given.size
    expected = mutation.expected(given)
    x, out = torch.from_numpy(given), torch.zeros(size)
    n = ROWS if mutation.kernel is mutants.chain else given.size
    code, plan = compiled(mutation, mutated, x, out, n)
    rules = {finding.rule for finding in check(code)}
    grid = (1,) if mutation.kernel is mutants.chain else (ROWS,)
    execute_plan(code, plan.arguments, grid, **how)
    return int((out.numpy().view(np.uint32) != expected.view(np.uint32)).sum()), rules


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation: Mutation) -> None:
    assert differing(mutation, False) == (0, set())
    if mutation.executor == "refuses":
        with pytest.raises(TranslationError, match="v_exp_f16"):
            differing(mutation, True)
        return
    moved = {"approximate": 1} if mutation.executor == "moved" else {}
    assert differing(mutation, False, **moved)[0] == 0
    count, rules = differing(mutation, True, **moved)
    assert count > 0
    assert rules == ({mutation.rule} if mutation.rule else set())


@pytest.mark.parametrize("shift", [-1, 1])
def test_ieee_sequences_do_not_depend_on_their_estimates(shift: int) -> None:
    """v_rcp and v_sqrt one unit in the last place off: divisions and square roots are still IEEE's."""
    for name in ("a Newton step dropped", "v_rcp_iflag_f32"):
        mutation = next(m for m in MUTATIONS if m.name == name)
        assert differing(mutation, False, approximate=shift)[0] == 0
    assert differing(next(m for m in MUTATIONS if m.name == "v_rcp_iflag_f32"), True, approximate=shift)[0] > 1000


def test_the_table_in_the_documentation_is_this_one() -> None:
    text = (Path(__file__).parents[3] / "docs" / "emulation.md").read_text()
    for mutation in MUTATIONS:
        said = {"bits": "bits differ", "moved": "bits differ once it is moved", "refuses": "refused by name"}
        executor = said[mutation.executor]
        assert f"| {mutation.name} | {mutation.rule or '-'} | {executor} |" in text
