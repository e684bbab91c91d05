"""The comparison of bits itself: what counts as a difference, and that a case that fails is reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fastpath.backend import TARGETS
from fastpath.conformance import frame
from fastpath.conformance.inputs import KINDS, sample, values
from reference.formats import FORMATS, encode


def test_one_bit_is_a_difference() -> None:
    x = np.array([1, 2], np.float32)
    y = x.copy()
    y.view(np.uint32)[1] ^= 1
    found = frame.compare("x", y, x)
    assert (found.compared, found.different) == (2, 1)
    assert found.first == "[1]: got 0x40000001, expected 0x40000000"


def test_signed_zeros_differ_and_nan_is_a_class() -> None:
    zeros = np.array([0.0, np.nan], np.float32)
    others = np.array([-0.0, np.nan], np.float32)
    others.view(np.uint32)[1] |= 0x80000001
    assert frame.compare("x", others, zeros).different == 1


def test_another_dtype_or_shape_is_a_difference_everywhere() -> None:
    x = np.zeros(3, np.float32)
    assert frame.compare("x", x.astype(np.float64), x).different == 3
    assert frame.compare("x", np.zeros(2, np.float32), x).different == 3


def test_bfloat16_is_compared_after_exact_widening() -> None:
    x = torch.tensor([1e-40, -0.0, 3.0]).to(torch.bfloat16)
    assert frame.compare("x", x, x.float().numpy()).different == 0
    assert frame.compare("x", -x, x.float().numpy()).different == 3


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_fit_their_format(kind: str) -> None:
    x = values(kind, (33, 65), "bfloat16", 0)
    encode(x, FORMATS["bfloat16"])  # raises for a value outside the format
    assert x.shape == (33, 65)
    assert np.isnan(x).any() == (kind == "nan")
    assert np.isinf(x).any() == (kind == "infinity")


def test_sample_keeps_both_ends() -> None:
    picked = sample(np.random.default_rng(0), 1000, 10)
    assert len(set(picked.tolist())) == 10
    assert {0, 999} <= set(picked.tolist())


def test_a_failing_case_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[frame.Comparison]:
        yield frame.compare("x", np.ones(2, np.float32), np.zeros(2, np.float32))
        raise ValueError("and then it broke")

    from fastpath.conformance import products

    monkeypatch.setattr(products, "cases", lambda: [frame.Case("broken", broken)])
    result = frame._run_case("products", "broken")
    assert not result["passed"]
    assert result["different"] == 2
    assert "and then it broke" in result["error"]


def test_what_is_done_is_saved_before_the_next_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def alike() -> Iterator[frame.Comparison]:
        yield frame.compare("x", np.ones(2, np.float32), np.ones(2, np.float32))

    from fastpath.conformance import products

    pair = [frame.Case("first", alike), frame.Case("second", alike)]
    monkeypatch.setattr(products, "cases", lambda: pair)
    monkeypatch.setattr(frame, "families", lambda: [("products", pair)])
    monkeypatch.setattr(frame, "current_target", lambda: TARGETS["cpu"])  # the cases launch nothing
    monkeypatch.setattr(frame, "INTERPRETED", True)
    saved: list[dict[str, Any]] = []
    report = frame.run(say=lambda _: None, save=saved.append)
    assert [case["name"] for case in report["cases"]] == ["first", "second"]
    (early,) = saved
    assert [case["name"] for case in early["cases"]] == ["first"]
    assert early["not_run"] == [{"name": "second", "reason": "interrupted before it"}]
