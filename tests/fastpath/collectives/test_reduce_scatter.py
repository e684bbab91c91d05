"""`fastpath.collectives.reduce_scatter` on two ranks against the reference, bit for bit, in Triton's interpreter."""

from __future__ import annotations

from tests.fastpath.conftest import Found


def test_bits_are_those_of_the_reference(two_ranks: Found) -> None:
    found = two_ranks["reduce_scatter"]
    assert found["compared"] and not found["different"], found["first"]
