"""No tokens: every operator gives an empty result of the right shape, under every contract one field away."""

from __future__ import annotations

import numpy as np
import pytest

from reference.contract import CONTRACTS, Contract, Value, fields, profile
from reference.contract.profiles import PROFILES
from reference.operators import DenseKeyValues, attention
from reference.reductions import REDUCTIONS
from reference.vectors.cases import Case, cases, run
from tests.reference.exact import random

#: Inputs that have a row per token, by operator; the others are weights, tables and keys.
ROWS = {
    "all_gather": ("rank0", "rank1", "rank2", "rank3"),
    "all_reduce": ("rank0", "rank1", "rank2", "rank3"),
    "attention": ("q", "positions"),
    "embedding": ("token_ids",),
    "entropy": ("logits",),
    "kv_cache": ("slots", "keys", "values"),
    "linear": ("x",),
    "lm_head": ("x",),
    "logprob": ("logits", "targets"),
    "logsumexp": ("logits",),
    "moe_combine": ("outputs", "weights", "experts"),
    "moe_router": ("logits",),
    "processed_logits": ("logits",),
    "qk_norm": ("x",),
    "reduce_scatter": ("rank0", "rank1", "rank2", "rank3"),
    "residual_add": ("x", "residual"),
    "rms_norm": ("x", "residual"),
    "rope": ("x", "positions"),
    "row_linear": ("x",),
    "swiglu": ("gate", "up"),
}


def without_rows(case: Case) -> Case:
    inputs = {name: x[:0] if name in ROWS[case.operator] else x for name, x in case.inputs.items()}
    length = {"length": 0} if "length" in case.attributes else {}
    return Case(case.operator, case.name, inputs, {**case.attributes, **length})


def contracts(operator: str) -> list[Contract]:
    kind = CONTRACTS[operator]
    changes: list[tuple[str, Value]] = [(path, v) for path, allowed in fields(kind).items() for v in allowed.values[1:]]
    found = [profile(name).contract(operator, dtype) for name in PROFILES for dtype in ("bfloat16", "float32")]
    for base in found[:2]:
        for path, value in changes:
            try:
                found.append(base.override(path, value))
            except ValueError:  # impossible together
                continue
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("operator", sorted(CONTRACTS))
def test_zero_rows_give_zero_rows(operator: str) -> None:
    compared = 0
    for case in (c for c in cases(operator, "bfloat16") if c.name.startswith("normal")):
        empty = without_rows(case)
        for contract in contracts(operator):
            try:
                whole = run(case, contract)
            except ValueError:  # a unit that does not take these operands
                continue
            found = run(empty, contract)
            assert {k: (v.dtype, v.shape) for k, v in found.items()} == {
                k: (v.dtype, (0, *v.shape[1:])) for k, v in whole.items()
            }, (case.name, contract)
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
@pytest.mark.parametrize("step", ["add", "square"])
def test_reductions_of_no_row(name: str, step: str) -> None:
    for rows in ((0,), (3, 0)):
        assert REDUCTIONS[name](np.zeros((*rows, 512), np.float32), step=step).shape == rows


def test_attention_of_no_query_over_no_key() -> None:
    kv = DenseKeyValues(random(1, 0, 2, 8), random(2, 0, 2, 8))
    found = attention(random(3, 0, 4, 8), np.zeros(0, np.int64), kv, profile("strict-v1").contract("attention"))  # type: ignore[arg-type]
    assert found.shape == (0, 4, 8)
