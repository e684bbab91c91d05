"""The compiled loops against the reference, in bits, on ordinary and on extreme values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from integration.backends import loops
from reference import operators as ops
from reference.checks import Float32Array
from reference.contract.profiles import profile
from reference.formats import FORMATS
from reference.operators.kv_cache import DenseKeyValues
from reference.rounding import round_to

Make = Callable[..., Float32Array]
DTYPES = ("bfloat16", "float32")
VALUES = ("normal", "wide", "special")


def maker(dtype: str, kind: str, seed: int = 0) -> Make:
    """Arrays of a kind: plain, of all exponents down to subnormals, or with zeros, infinities and NaN among them."""
    rng = np.random.default_rng(seed)

    def make(*shape: int) -> Float32Array:
        x = rng.standard_normal(shape).astype(np.float32)
        if kind != "normal":
            x *= np.exp2(rng.integers(-75 if kind == "wide" else -140, 20, shape)).astype(np.float32)
        if kind == "special":
            chosen = rng.random(shape)
            for value, limit in ((0.0, 0.9), (-0.0, 0.93), (np.inf, 0.96), (-np.inf, 0.98), (np.nan, 0.99)):
                x[chosen > limit] = value
        return round_to(x, FORMATS[dtype])

    return make


def cases(make: Make) -> dict[str, tuple[Any, ...]]:
    """Operator -> arguments before the contract; rows alone and many, widths that are no power of two."""
    q, k, v = make(70, 4, 32), make(200, 2, 32), make(200, 2, 32)
    positions = np.arange(13, 13 + 70 * 2, 2)
    table = ops.rope_table(np.arange(9), 32, 1e6, contract("rope", "float32"))
    logits = make(5, 509) * np.float32(8)
    logits[:, 7] = 1.0  # a row needs a finite entry
    return {
        "linear": (make(5, 129), make(37, 129)),
        "lm_head": (make(1, 128), make(509, 128)),
        "row_linear": (make(5, 128), make(37, 128)),
        "attention": (q, positions, DenseKeyValues(k, v)),
        "rms_norm": (make(7, 300), make(300), 1e-6),
        "qk_norm": (make(7, 3, 32), make(32), 1e-6),
        "rope": (make(9, 3, 32), table),
        "swiglu": (make(5, 77) * np.float32(16), make(5, 77)),
        "logsumexp": (logits,),
    }


def contract(operator: str, dtype: str) -> Any:
    return profile("strict-v1/fma32-seq").contract(operator, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("operator", list(cases(maker("float32", "normal"))))
def test_compiled_loops_have_the_bits_of_the_reference(operator: str, kind: str, dtype: str) -> None:
    arguments, rules = cases(maker(dtype, kind))[operator], contract(operator, dtype)
    assert loops._follows(rules), "the kernel was not even tried"
    for found, expected in zip(
        results(loops, operator, arguments, rules), results(ops, operator, arguments, rules), strict=True
    ):
        nan = np.isnan(expected)
        assert np.array_equal(np.isnan(found), nan)
        assert np.array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def results(module: Any, operator: str, arguments: tuple[Any, ...], rules: Any) -> list[Float32Array]:
    if operator == "row_linear":
        return [module.row_linear_partial(*arguments, rules, ranks) for ranks in (1, 2, 4, 8)]
    found = getattr(module, operator)(*arguments, rules)
    parts = found if isinstance(found, tuple) else (found,)
    return [part for part in parts if part is not None]


@pytest.mark.parametrize("operator", list(cases(maker("float32", "normal"))))
def test_no_rows_are_no_error(operator: str) -> None:
    arguments, rules = cases(maker("bfloat16", "normal"))[operator], contract(operator, "bfloat16")
    empty = [arguments[0][:0], *arguments[1:]]
    if operator in ("swiglu", "attention"):
        empty[1] = arguments[1][:0]
    if operator == "rope":
        empty[1] = ops.RopeTable(*(part[:0] for part in arguments[1]))
    whole = results(loops, operator, arguments, rules)
    for found, full in zip(results(loops, operator, tuple(empty), rules), whole, strict=True):
        assert found.shape == (0, *full.shape[1:])


@pytest.mark.parametrize("setting", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 40, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("module", [loops, ops], ids=["loops", "reference"])
def test_a_nan_anywhere_in_a_row_gives_a_nan_logprob(module: Any, setting: dict[str, Any]) -> None:
    """Whatever the masks keep: a NaN is below every threshold, and a mask once made a finite row of such a row."""
    names = ("processed_logits", "logsumexp", "logprob")
    processed, lse, logprob = (contract(name, "float32") for name in names)
    logits = maker("float32", "normal")(4, 301)
    for column in (0, 5, 300):
        for value in (np.nan, -np.nan):
            spoilt = logits.copy()
            spoilt[2, column] = value
            scaled = module.processed_logits(spoilt, processed, 0.7, **setting)
            sums = module.logsumexp(scaled, lse)
            found = [module.logprob(scaled, np.full(4, target), sums, logprob) for target in (0, 7, 300)]
            assert np.isnan(np.stack(found)[:, 2]).all(), "a corrupted row scored as a healthy one"
            clean = module.processed_logits(logits, processed, 0.7, **setting)
            assert np.array_equal(np.delete(scaled, 2, 0).view(np.uint32), np.delete(clean, 2, 0).view(np.uint32))


def test_another_contract_goes_to_the_reference() -> None:
    x, weight = maker("bfloat16", "normal")(3, 64), maker("bfloat16", "normal", 1)(5, 64)
    rules = contract("linear", "bfloat16").replace({"order.k": "descending"})
    assert not loops._follows(rules)
    assert np.array_equal(loops.linear(x, weight, rules), ops.linear(x, weight, rules))


def test_gathered_blocks_are_those_of_the_table() -> None:
    rng = np.random.default_rng(2)
    cache = rng.integers(0, 1 << 16, (6, 2, 16, 8), dtype=np.uint16)
    keys, values = loops.gather_blocks(cache, np.array([4, 0, 3]), 5, 40)
    logical = cache[[4, 0, 3]].transpose(0, 2, 1, 3).reshape(48, 2, 8)[5:40]
    assert np.array_equal(keys.view(np.uint32) >> 16, logical[..., :4])
    assert np.array_equal(values.view(np.uint32) >> 16, logical[..., 4:])
