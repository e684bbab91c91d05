"""Which class of processor this is, as far as the native profiles tell classes apart."""

from __future__ import annotations

import platform
from pathlib import Path

#: The class that native profiles were measured on.
MODELLED = "AVX-512 BF16"


def measured_on(profile: str) -> str | None:
    """The class of processor that a native profile was measured on; None for a specification, which holds anywhere."""
    return None if profile.startswith("strict-") else MODELLED


def processor_class(flags: frozenset[str] | None = None) -> str:
    """``AVX-512 BF16``, ``AMX``, ``AVX-512`` or ``AVX2``; elsewhere the machine's name.

    The libraries choose their matrix products by it, and each sums in an order of its own: a native profile holds for
    one class.

    Args:
        flags: of the processor, as Linux lists them; None reads this one's.
    """
    flags = _flags() if flags is None else flags
    for name, needed in (("AMX", "amx_bf16"), (MODELLED, "avx512_bf16"), ("AVX-512", "avx512f"), ("AVX2", "avx2")):
        if needed in flags:
            return name
    return platform.machine()


def _flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return next((frozenset(value.split()) for name, _, value in lines if name.strip() == "flags"), frozenset())
