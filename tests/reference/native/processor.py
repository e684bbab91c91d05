"""Which processor the native profiles model."""

from __future__ import annotations

import pytest

from diffcheck.base.processor import MODELLED, processor_class

modelled_processor = pytest.mark.skipif(
    processor_class() != MODELLED,
    reason=f"models the matrix products of {MODELLED}; on {processor_class()} the libraries sum in another order",
)
