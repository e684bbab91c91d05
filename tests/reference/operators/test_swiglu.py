"""SwiGLU against a scalar specification, every bfloat16 gate, and its edges."""

from __future__ import annotations

import numpy as np
import pytest

from reference.formats import FORMATS, decode
from reference.operators import SwigluContract, swiglu
from reference.primitives import exp
from reference.vectors.values import special
from tests.reference.exact import add, assert_same_bits, div, mul, one, rnd

CONTRACT = SwigluContract()


@pytest.mark.parametrize("silu_format", ["float32", "bfloat16"])
def test_equals_scalar_specification(silu_format: str) -> None:
    gate = np.linspace(-12, 12, 200, dtype=np.float32)[None]
    up = np.linspace(3, -5, 200, dtype=np.float32)[None]
    contract = CONTRACT.override("rounding.silu", silu_format)
    expected = []
    for g, u in zip(gate[0].tolist(), up[0].tolist(), strict=True):
        silu = rnd(div(g, add(1.0, one(exp, -g))), silu_format) if g else g
        expected.append(rnd(mul(silu, u), "bfloat16"))
    assert_same_bits(swiglu(gate, up, contract)[0], np.array(expected, np.float32))


def test_every_bfloat16_gate_is_close_to_float64() -> None:
    gate = decode(np.arange(1 << 16, dtype=np.uint16), FORMATS["bfloat16"])[None]
    gate = np.where(np.isfinite(gate), gate, np.float32(0))
    got = swiglu(gate, np.ones_like(gate), CONTRACT.with_dtype("float32"))
    with np.errstate(over="ignore"):
        exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    # where exp(-x) overflows float32 the result is -0
    normal = np.abs(exact) > 2.0**-126
    normal &= gate > -88
    assert (np.abs(got - exact)[normal] <= 2.0**-22 * np.abs(exact)[normal]).all()
    assert (got[gate < -89] == 0).all()


def test_specials_stay_in_their_column() -> None:
    gate, up = special("swiglu/gate", (4, 64), "bfloat16"), special("swiglu/up", (4, 64), "bfloat16")
    whole = swiglu(gate, up, CONTRACT)
    columns = [swiglu(gate[:, i : i + 1], up[:, i : i + 1], CONTRACT) for i in range(64)]
    assert_same_bits(whole, np.concatenate(columns, axis=1))
    one_row = np.array([[np.inf, -np.inf, np.nan, -0.0]], np.float32)
    result = swiglu(one_row, np.ones_like(one_row), CONTRACT)[0]
    assert result[0] == np.inf and np.isnan(result[1:3]).all() and str(result[3]) == "-0.0"


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="up: shape"):
        swiglu(np.zeros((2, 4), np.float32), np.zeros((4, 2), np.float32), CONTRACT)
