"""Every contract field is honoured: any two of its values give different bits on some input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import reference.operators as ops
from reference.contract import CONTRACTS, Contract, Value, fields
from reference.primitives import exp
from reference.reductions import chain, lanes_tree, warp_shuffle
from reference.vectors.cases import Arrays, Case, cases, run
from tests.reference.exact import bits, random

FIELDS = [(operator, path) for operator, kind in sorted(CONTRACTS.items()) for path in fields(kind)]
#: Fields that an operator has by inheritance, and every value of which but the default is refused.
WITHOUT_USE = {("lm_head", "order.bias")}


def contexts(kind: type[Contract], path: str) -> Iterator[dict[str, Value]]:
    """Other fields to set: first what is known to decide, then none, then one each."""
    if path == "domain.input":  # the units that treat formats apart
        yield {"primitives.unit": "mfma-cdna1"}
    yield {}
    for other, allowed in fields(kind).items():
        if other != path:
            yield from ({other: value} for value in allowed.values[1:])


def variants(kind: type[Contract], path: str, extra: dict[str, Value]) -> Iterator[dict[Value, Contract]]:
    """Value of ``path`` -> contract: without its output rounding, for float32, as it is; what cannot be is left out."""
    for change in (unrounded, lambda contract: contract.with_dtype("float32"), lambda contract: contract):
        found: dict[Value, Contract] = {}
        for value in fields(kind)[path].values:
            try:
                contract = change(kind().replace({**extra, path: value}))
            except ValueError:
                continue
            if contract.get(path) == value:
                found[value] = contract
        yield found


def deciding_cases(operator: str) -> list[Case]:
    """Inputs that decide what the vectors' cases cannot: long rows, rare values, thresholds met exactly."""
    return DECIDING[operator]() if operator in DECIDING else []


def attention() -> list[Case]:
    """700 keys, enough for every kind of split; a head size whose root is no power of two; a probability of 2^-130.

    Eleven keys: fewer than the lanes of a register.
    """
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
    few: Arrays = {
        "q": random(5, 11, 2, 24, scale=2.0),
        "positions": np.arange(11),
        "k": random(6, 11, 1, 24),
        "v": random(7, 11, 1, 24),
    }
    return [
        Case("attention", "deep", deep, {"packed_offset": 100}),
        Case("attention", "tiny", tiny),
        Case("attention", "few", few),
    ]


def long_rows(operator: str) -> list[Case]:
    """K and outputs such that every block size cuts K."""
    size = 16_384 if operator == "row_linear" else 2304
    return [Case(operator, "long", {"x": random(1, 2, size), "weight": random(2, 4, size)})]


def norms() -> list[Case]:
    """A row longer than 1024 lanes, sizes that are no power of two, and the one significand that rsqrt misses."""
    missed = np.array([[2.0**-70, 0.0]], np.float32)
    return [
        Case("rms_norm", "long", {"x": random(1, 8, 2400), "weight": random(2, 2400)}, {"epsilon": 1e-6}),
        Case("rms_norm", "short", {"x": random(3, 64, 11), "weight": random(4, 11)}, {"epsilon": 1e-6}),
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
    for seed in range(24):  # rows shorter than a register
        logits = random(seed, 1, 11, fmt="float32")
        weights = exp(np.sort(logits, axis=1) - logits.max())
        for total in (chain(weights), warp_shuffle(weights, warp=16, warps=1)):
            for p in 1 - np.add.accumulate(weights / total[:, None], axis=1)[0, 4:-1]:
                found.append(Case("processed_logits", f"short-{p}", {"logits": logits}, {"top_p": float(p)}))
    for seed in (12, 43, *range(8, 12), *range(13, 20)):  # every order of the sum gives another value for 12 and 43
        logits = random(seed, 1, 2500, fmt="float32")
        ascending = np.sort(logits, axis=1)
        weights = exp(ascending - ascending[:, -1:])
        cumulated = np.add.accumulate(weights / lanes_tree(weights)[:, None], axis=1)
        for p in 1 - cumulated[0, 1500:2490:30]:
            found.append(Case("processed_logits", f"exact-{p}", {"logits": logits}, {"top_p": float(p)}))
    return found


def experts() -> list[Case]:
    """Many experts, a correction bias, logits that tie, and ones that only their softmax ties."""
    logits, bias = random(9, 32, 1500, fmt="float32"), random(10, 1500, fmt="float32", scale=0.01)
    tied = np.zeros((1, 8), np.float32)
    near = np.array([[0.0, 2.0**-30, -1.0, -2.0]], np.float32)
    return [
        Case("moe_router", "many", {"logits": logits}, {"k": 4}),
        Case("moe_router", "bias", {"logits": logits, "bias": bias}, {"k": 4}),
        Case("moe_router", "tied", {"logits": tied}, {"k": 2}),
        Case("moe_router", "near", {"logits": near}, {"k": 1}),
    ]


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


def outcome(case: Case, contract: Contract) -> bytes | None:
    """All output bits of a case; None where the operator refuses it."""
    try:
        arrays = run(case, contract).items()
    except ValueError:
        return None
    return b"".join((bits(x) if x.dtype == np.float32 else x).tobytes() for _, x in sorted(arrays))


def are_same(one: bytes | None, other: bytes | None) -> bool:
    """Whether two outcomes tell nothing apart."""
    return one is None or other is None or one == other


@pytest.mark.parametrize(("operator", "path"), FIELDS)
def test_every_two_values_of_a_field_give_different_bits(operator: str, path: str) -> None:
    """On some input, in some contract: a value that is ignored, or taken for another one, cannot pass."""
    kind = CONTRACTS[operator]
    left = {frozenset(pair) for pair in itertools.combinations(fields(kind)[path].values, 2)}
    for extra in contexts(kind, path):
        for contracts in variants(kind, path, extra):
            for case in CASES[operator]:
                wanted = {value for pair in left if pair <= set(contracts) for value in pair}
                if not wanted:
                    break
                found = {value: outcome(case, contracts[value]) for value in wanted}
                left = {pair for pair in left if not pair <= wanted or are_same(*(found[value] for value in pair))}
            if not left:
                assert (operator, path) not in WITHOUT_USE
                return
    assert (operator, path) in WITHOUT_USE, f"{operator}: {path}: no input tells {[tuple(pair) for pair in left]} apart"


@pytest.mark.parametrize(("operator", "path"), sorted(WITHOUT_USE))
def test_a_field_without_use_keeps_its_default(operator: str, path: str) -> None:
    for value in fields(CONTRACTS[operator])[path].values[1:]:
        with pytest.raises(ValueError, match=f"{operator}: {path} must stay"):
            CONTRACTS[operator]().override(path, value)


def test_every_operator_has_a_function_and_cases() -> None:
    for operator in CONTRACTS:
        assert callable(getattr(ops, operator, None)) or operator == "kv_cache"
        assert CASES[operator]
