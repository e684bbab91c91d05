"""`fastpath.experts.moe_combine` against the reference, bit for bit, in Triton's interpreter."""

from __future__ import annotations

from tests.fastpath.conftest import Found
from tests.fastpath.interpreter import assert_conforms


def test_bits_are_those_of_the_reference(conformance: Found) -> None:
    assert_conforms(conformance, "moe_combine")
