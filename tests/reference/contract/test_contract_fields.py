"""Every contract field is honoured: changing it changes bits on some input, or the contract says why it cannot."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import reference.operators as ops
from reference.contract import CONTRACTS, Contract, Value, fields
from reference.primitives import exp
from reference.reductions import lanes_tree
from reference.vectors.cases import Arrays, Case, cases, run
from tests.reference.exact import bits, random

MUTATIONS = [
    (operator, path, value)
    for operator, kind in sorted(CONTRACTS.items())
    for path, allowed in fields(kind).items()
    for value in allowed.values[1:]
]


def contexts(kind: type[Contract], path: str, value: Value) -> Iterator[Contract]:
    """Contracts in which ``path`` may be the default or ``value``: the default one, or with one or two others set."""
    others = [(p, v) for p, c in fields(kind).items() if p != path for v in c.values[1:]]
    for count in (0, 1, 2):
        for extra in itertools.combinations(others, count):
            if len({p for p, _ in extra}) < count:
                continue
            try:
                base = kind().replace(dict(extra))
                base.override(path, value)
            except ValueError:
                continue
            yield base


def deciding_cases(operator: str) -> list[Case]:
    """Inputs that decide what the vectors' cases cannot: long rows, rare values, thresholds met exactly."""
    return DECIDING[operator]() if operator in DECIDING else []


def attention() -> list[Case]:
    """700 keys, enough for every kind of split; a head size whose root is no power of two; a probability of 2^-130."""
    deep: Arrays = {
        "q": random(1, 3, 2, 24, scale=2.0),
        "positions": np.array([600, 650, 699]),
        "k": random(2, 700, 1, 24),
        "v": random(3, 700, 1, 24),
        "sinks": random(4, 2),
    }
    tiny: Arrays = {
        "q": np.full((1, 1, 1), 8.0, np.float32),
        "positions": np.array([1]),
        "k": np.array([0.0, -11.25], np.float32).reshape(2, 1, 1),
        "v": np.array([0.0, 2.0**120], np.float32).reshape(2, 1, 1),
    }
    return [Case("attention", "deep", deep, {"packed_offset": 100}), Case("attention", "tiny", tiny)]


def long_rows(operator: str) -> list[Case]:
    """K and outputs such that every block size cuts K."""
    size = 16_384 if operator == "row_linear" else 2304
    return [Case(operator, "long", {"x": random(1, 2, size), "weight": random(2, 4, size)})]


def norms() -> list[Case]:
    """A row longer than 1024 lanes, sizes that are no power of two, and the one significand that rsqrt misses."""
    missed = np.array([[2.0**-70, 0.0]], np.float32)
    return [
        Case("rms_norm", "long", {"x": random(1, 8, 2400), "weight": random(2, 2400)}, {"epsilon": 1e-6}),
        Case(
            "rms_norm",
            "rare",
            {"x": missed, "weight": np.ones(2, np.float32)},
            {"epsilon": float.fromhex("0x1.13e07p1")},
        ),
    ]


def head_norms() -> list[Case]:
    return [Case("qk_norm", c.name, {**c.inputs, "x": c.inputs["x"][:, None]}, c.attributes) for c in norms()]


def vocabulary(operator: str) -> list[Case]:
    """1,024 rows of 301 logits, flat to peaked, 0 the largest: nothing is added to the logarithm of the sum."""
    logits = -np.abs(random(5, 1024, 301, fmt="float32")) * np.exp2(np.arange(1024, dtype=np.float32) / 128)[:, None]
    logits[:, 0] = 0
    return [*long_vocabulary(operator), Case(operator, "many", {"logits": logits, "targets": np.arange(1024) % 301})]


def long_vocabulary(operator: str) -> list[Case]:
    """Segments longer than every number of lanes."""
    return [Case(operator, "long", {"logits": random(6, 1, 16_001, fmt="float32"), "targets": np.zeros(1, np.int64)})]


def negative_zero() -> list[Case]:
    return [
        Case("embedding", "negative-zero", {"table": np.full((1, 1), -0.0, np.float32), "token_ids": np.zeros(1, int)})
    ]


def thresholds() -> list[Case]:
    """Ties at top-k, and top-p values that the cumulated probability meets exactly."""
    ties = np.array([[1, 5, 5, 3, 5, 0, 2, 4]], np.float32)
    falling = np.array([[3, 2, 1, 0]], np.float32)
    found = [
        Case("processed_logits", "ties", {"logits": ties}, {"top_k": 2}),
        Case("processed_logits", "even", {"logits": np.zeros((1, 4), np.float32)}, {"top_p": 0.5}),
        Case("processed_logits", "both", {"logits": falling}, {"top_k": 2, "top_p": 0.7}),
    ]
    for seed in (12, 43, *range(8, 12), *range(13, 20)):  # every order of the sum gives another value for 12 and 43
        logits = random(seed, 1, 2500, fmt="float32")
        ascending = np.sort(logits, axis=1)
        weights = exp(ascending - ascending[:, -1:])
        cumulated = np.add.accumulate(weights / lanes_tree(weights)[:, None], axis=1)
        for p in 1 - cumulated[0, 1500:2490:30]:
            found.append(Case("processed_logits", f"exact-{p}", {"logits": logits}, {"top_p": float(p)}))
    return found


def experts() -> list[Case]:
    return [Case("moe_router", "many", {"logits": random(9, 32, 1500, fmt="float32")}, {"k": 4})]


DECIDING: dict[str, Callable[[], list[Case]]] = {
    "attention": attention,
    "embedding": negative_zero,
    "entropy": lambda: vocabulary("entropy"),
    "linear": lambda: long_rows("linear"),
    "lm_head": lambda: long_rows("lm_head"),
    "logprob": lambda: vocabulary("logprob"),
    "logsumexp": lambda: vocabulary("logsumexp"),
    "moe_router": experts,
    "processed_logits": thresholds,
    "qk_norm": head_norms,
    "rms_norm": norms,
    "row_linear": lambda: long_rows("row_linear"),
}

CASES = {
    operator: [*cases(operator, "bfloat16"), *deciding_cases(operator), *cases(operator, "float32")]
    for operator in sorted(CONTRACTS)
}


def unrounded(contract: Contract) -> Contract:
    """The contract without its output rounding, which hides most differences."""
    path = "rounding.output"
    return contract.override(path, "float32") if path in fields(type(contract)) else contract


def differs(case: Case, left: Contract, right: Contract) -> bool:
    """Whether two contracts give different bits on a case; a case that either refuses does not count."""
    try:
        a, b = run(case, left), run(case, right)
    except ValueError:
        return False
    return any(
        not np.array_equal(bits(a[k]), bits(b[k])) if a[k].dtype == np.float32 else not np.array_equal(a[k], b[k])
        for k in a
    )


@pytest.mark.parametrize(("operator", "path", "value"), MUTATIONS, ids=lambda v: str(v))
def test_changing_a_field_changes_bits(operator: str, path: str, value: Value) -> None:
    kind = CONTRACTS[operator]
    documented = fields(kind)[path].equivalent
    for base in itertools.islice(contexts(kind, path, value), 1 if documented else 8):
        for left in (unrounded(base), base.with_dtype("float32"), base):
            try:
                right = left.override(path, value)
            except ValueError:
                continue
            if left != right and any(differs(case, left, right) for case in CASES[operator]):
                return
    assert fields(kind)[path].equivalent, (
        f"{operator}: {path} = {value!r} changes nothing and is not documented as equivalent"
    )


def test_every_operator_has_a_function_and_cases() -> None:
    for operator in CONTRACTS:
        assert callable(getattr(ops, operator, None)) or operator == "kv_cache"
        assert CASES[operator]
