"""Products that a caller computes again and again: contracts that cut the same chain differently share its pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from reference.checks import Float32Array

#: Results above this many elements are not kept: time goes into elements there, not into steps.
_LARGEST = 1 << 15

_memory: ContextVar[dict[bytes, Float32Array] | None] = ContextVar("remembered products", default=None)


@contextmanager
def remember() -> Iterator[None]:
    """Inside, a small `dot` of operands that were seen before is looked up: the same bits in less time."""
    token = _memory.set({})
    try:
        yield
    finally:
        _memory.reset(token)


def recalled(
    name: str, operands: tuple[Float32Array, Float32Array, Float32Array], compute: Callable[[], Float32Array]
) -> Float32Array:
    """``compute()``, or its earlier result for operands of the same bits under the same ``name``."""
    known = _memory.get()
    if known is None or operands[2].size > _LARGEST:
        return compute()
    digest = hashlib.sha256(name.encode())
    for operand in operands:
        digest.update(repr(operand.shape).encode())
        digest.update(np.ascontiguousarray(operand).data)
    key = digest.digest()
    if key not in known:
        known[key] = compute()
    return known[key].copy()
