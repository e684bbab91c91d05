"""RMSNorm against a scalar specification, and at its edges."""

from __future__ import annotations

import numpy as np
import pytest

from reference.contract import profile
from reference.operators import RmsNormContract, rms_norm
from reference.primitives import rsqrt
from tests.reference.exact import add, assert_same_bits, div, fma, mul, one, random, rnd, tree

STRICT = RmsNormContract()
EPSILON = 1e-6


def scalar_norm(x: list[float], weight: list[float], contract: RmsNormContract = STRICT) -> list[float]:
    """The strict norm of one row, one operation at a time."""
    width = min(256, 1 << (len(x).bit_length() - 1))
    lane = [0.0] * width
    for i, value in enumerate(x):
        lane[i % width] = fma(value, value, lane[i % width])
    mean = add(div(tree(lane), float(len(x))), float(np.float32(EPSILON)))
    scale = one(rsqrt, mean)
    normalised = [rnd(mul(value, scale), contract.rounding.normalised) for value in x]
    return [rnd(mul(n, w), contract.rounding.output) for n, w in zip(normalised, weight, strict=True)]


@pytest.mark.parametrize("size", [1, 3, 64, 100, 300])
@pytest.mark.parametrize(
    "contract", [STRICT, STRICT.with_dtype("float32"), STRICT.override("rounding.normalised", "bfloat16")]
)
def test_equals_scalar_specification(size: int, contract: RmsNormContract) -> None:
    x, weight = random(size, 2, size, fmt=contract.rounding.output), random(1, size)
    expected = [scalar_norm(row.tolist(), weight.tolist(), contract) for row in x]
    assert_same_bits(rms_norm(x, weight, EPSILON, contract).output, np.array(expected, np.float32))


def test_strict_rounds_the_residual_sum_first_and_vllm_does_not() -> None:
    x, residual, weight = random(1, 3, 80), random(2, 3, 80), random(3, 80)
    total = [
        [add(a, b) for a, b in zip(*rows, strict=True)] for rows in zip(x.tolist(), residual.tolist(), strict=True)
    ]
    rounded = [[rnd(s, "bfloat16") for s in row] for row in total]
    strict = rms_norm(x, weight, EPSILON, STRICT, residual)
    assert strict.residual is not None
    assert_same_bits(strict.residual, np.array(rounded, np.float32))
    assert_same_bits(strict.output, np.array([scalar_norm(row, weight.tolist()) for row in rounded], np.float32))
    fused = rms_norm(x, weight, EPSILON, STRICT.override("rounding.sum", "float32"), residual)
    assert_same_bits(fused.output, np.array([scalar_norm(row, weight.tolist()) for row in total], np.float32))
    assert (fused.output != strict.output).any()


def test_a_row_does_not_depend_on_its_batch() -> None:
    x, weight = random(4, 9, 333), random(5, 333)
    together = rms_norm(x, weight, EPSILON, STRICT).output
    alone = [rms_norm(x[i : i + 1], weight, EPSILON, STRICT).output for i in range(9)]
    assert_same_bits(together, np.concatenate(alone))


@pytest.mark.parametrize("name", ["strict-v1", "vllm-0.32-cpu", "megatron-0.16-local"])
def test_is_close_to_float64(name: str) -> None:
    contract = profile(name).contract("rms_norm", "float32")
    x, weight = random(6, 4, 1000, fmt="float32"), random(7, 1000, fmt="float32")
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + EPSILON) * weight
    got = rms_norm(x, weight, EPSILON, contract).output  # type: ignore[arg-type]
    assert np.abs(got - exact).max() <= 2**-21 * np.abs(exact).max()


def test_edges() -> None:
    ones = np.ones(2, np.float32)
    contract = STRICT.with_dtype("float32")

    def norm(*row: float) -> list[float]:
        return rms_norm(np.array([row], np.float32), ones, EPSILON, contract).output[0].tolist()  # type: ignore[no-any-return]

    assert str(norm(-0.0, 0.0)) == "[-0.0, 0.0]"
    assert norm(3e38, 1.0) == [0.0, 0.0]  # the square overflows, its reciprocal root is 0
    assert np.isnan(norm(np.inf, 1.0)[0]) and norm(np.inf, 1.0)[1] == 0
    assert np.isnan(norm(np.nan, 1.0)).all()
    assert norm(2.0**-149, 0.0)[0] == np.float32(2.0**-149) * np.float32(1000)  # subnormals are kept


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": np.zeros((2, 4))}, TypeError, "x: expected dtype float32"),
        ({"x": np.zeros((2, 4), ">f4")}, TypeError, "x: byte order"),
        ({"x": np.zeros(4, np.float32)}, ValueError, r"x: expected shape \[tokens, hidden\]"),
        ({"weight": np.zeros(3, np.float32)}, ValueError, "weight: axis 0 .hidden. must be 4"),
        ({"residual": np.zeros((3, 4), np.float32)}, ValueError, "residual: shape"),
        ({"epsilon": 0.0}, ValueError, "epsilon: must be finite and above 0"),
    ],
)
def test_bad_input(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {
        "x": np.zeros((2, 4), np.float32),
        "weight": np.ones(4, np.float32),
        "epsilon": 1e-6,
        "contract": STRICT,
    }
    with pytest.raises(error, match=message):
        rms_norm(**{**arguments, **change})  # type: ignore[arg-type]
