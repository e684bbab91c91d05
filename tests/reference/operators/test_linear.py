"""Linear projection against a scalar specification; independence of its rows, columns and zero padding."""

from __future__ import annotations

import numpy as np
import pytest

from reference.contract import profile
from reference.operators import LinearContract, linear
from tests.reference.exact import add, assert_same_bits, chain_dot, random, rnd, tree

CONTRACT = LinearContract()
STRICT_PROFILES = ("strict-v1/fma32-seq", "strict-v1/mfma-cdna3-g8", "strict-v1/hopper-k16")


def scalar_linear(x: list[float], w: list[float], bias: float | None, contract: LinearContract) -> float:
    """One output, one operation at a time (unit fma32-seq)."""
    order = list(range(len(x)))
    segments = contract.partition.segments
    width = len(x) // segments
    parts = []
    for s in range(segments):
        ks = order[s * width : (s + 1) * width]
        if contract.order.k == "descending":
            ks = ks[::-1]
        if contract.order.k == "even_odd":
            ks = ks[::2] + ks[1::2]
        start = bias if bias is not None and contract.order.bias == "in_accumulator" and s == 0 else 0.0
        block = contract.partition.block_k or width
        pieces = [ks[i : i + block] for i in range(0, width, block)]
        total = chain_dot([x[k] for k in pieces[0]], [w[k] for k in pieces[0]], start)
        for piece in pieces[1:]:
            total = add(total, chain_dot([x[k] for k in piece], [w[k] for k in piece]))
        parts.append(rnd(total, contract.rounding.partial))
    if contract.order.merge == "tree":
        total = tree(parts)
    else:
        total = parts[0]
        for part in parts[1:]:
            total = add(total, part)
    output = contract.rounding.output
    if bias is None or contract.order.bias == "in_accumulator":
        return rnd(total, output)
    if contract.order.bias == "after_rounding":
        return rnd(add(rnd(total, output), bias), output)
    return rnd(add(total, bias), output)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"order.bias": "after_rounding"},
        {"order.bias": "in_accumulator", "partition.segments": 2},
        {"partition.segments": 8, "rounding.partial": "bfloat16"},
        {"partition.segments": 4, "order.merge": "chain", "order.k": "descending"},
        {"partition.block_k": 64, "order.k": "even_odd"},
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equals_scalar_specification(changes: dict[str, object], dtype: str) -> None:
    contract = CONTRACT.replace(changes).with_dtype(dtype)  # type: ignore[arg-type]
    x, w, b = random(1, 2, 160, fmt=dtype), random(2, 3, 160, fmt=dtype), random(3, 3, fmt=dtype)
    for bias in (None, b):
        got = linear(x, w, contract, bias)
        for t, n in np.ndindex(2, 3):
            one = None if bias is None else float(bias[n])
            assert got[t, n] == np.float32(scalar_linear(x[t].tolist(), w[n].tolist(), one, contract))


@pytest.mark.parametrize("name", STRICT_PROFILES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_and_columns_are_independent(name: str, dtype: str) -> None:
    contract = profile(name).contract("linear", dtype).override("rounding.output", "float32")
    x, w = random(1, 5, 96, fmt=dtype), random(2, 7, 96, fmt=dtype)
    whole = linear(x, w, contract)  # type: ignore[arg-type]
    rows = [linear(x[i : i + 1], w, contract) for i in range(5)]  # type: ignore[arg-type]
    assert_same_bits(whole, np.concatenate(rows))
    columns = [linear(x, w[j : j + 1], contract) for j in range(7)]  # type: ignore[arg-type]
    assert_same_bits(whole, np.concatenate(columns, axis=1))


@pytest.mark.parametrize("name", STRICT_PROFILES)
def test_zero_padding_of_k_changes_nothing(name: str) -> None:
    contract = profile(name).contract("linear").override("rounding.output", "float32")
    x, w = random(1, 3, 90), random(2, 4, 90)
    padded = [np.pad(a, ((0, 0), (0, 38))) for a in (x, w)]
    assert_same_bits(linear(x, w, contract), linear(*padded, contract))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STRICT_PROFILES)
def test_is_close_to_float64(name: str) -> None:
    contract = profile(name).contract("linear").override("rounding.output", "float32")
    x, w = random(1, 4, 1024), random(2, 16, 1024)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    assert (np.abs(linear(x, w, contract) - exact) <= 1024 * 2.0**-24 * size).all()  # type: ignore[arg-type]


def test_overflow_and_specials() -> None:
    contract = CONTRACT.with_dtype("float32")
    weight = np.ones((1, 3), np.float32)

    def one(*x: float) -> float:
        return float(linear(np.array([x], np.float32), weight, contract)[0, 0])

    assert one(3e38, 3e38, -3e38) == np.inf  # the sum overflows on the way
    assert np.isnan(one(np.inf, -np.inf, 0)) and one(np.inf, 1, 1) == np.inf
    assert one(2.0**-149, 0, 0) == 2.0**-149
    assert str(one(-0.0, -0.0, -0.0)) == "0.0"  # the accumulator starts at +0


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (np.zeros((2, 8), np.float32), np.zeros((3, 9), np.float32), r"weight: axis 1 \(inputs\) must be 8"),
        (np.zeros((2, 0), np.float32), np.zeros((3, 0), np.float32), "0 inputs cannot be cut"),
        (np.full((2, 8), 1.001, np.float32), np.zeros((3, 8), np.float32), "x: 1.00.* is not a bfloat16 value"),
    ],
)
def test_bad_values(x: object, weight: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear(x, weight, CONTRACT)  # type: ignore[arg-type]


def test_impossible_contracts() -> None:
    with pytest.raises(ValueError, match=r"order.merge must stay 'tree' with 1 segment"):
        CONTRACT.override("order.merge", "chain")
    with pytest.raises(ValueError, match=r"domain.input float32 is impossible with primitives.unit hopper-k16"):
        CONTRACT.replace({"domain.input": "float32", "primitives.unit": "hopper-k16"})
    assert profile("strict-v1/hopper-k16").contract("linear", "float32").get("primitives.unit") == "fma32-seq"
