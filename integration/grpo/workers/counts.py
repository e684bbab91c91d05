"""What operators ran, added up over many calls of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def add_operators(total: dict[str, dict[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the operators of a strict path's evidence to ``total``: name -> ``calls``, ``contract_id`` (several by
    commas) and, of kernels, whose calls are launches, ``kernels`` by name.
    """
    for name, entry in found.items():
        known = total.setdefault(name, {"calls": 0, "contract_id": entry["contract_id"]})
        ids = dict.fromkeys(", ".join((known["contract_id"], entry["contract_id"])).split(", "))
        known["contract_id"] = ", ".join(ids)
        known["calls"] += entry["calls"]
        for kernel, count in entry.get("kernels", {}).items():
            kernels = known.setdefault("kernels", {})
            kernels[kernel] = kernels.get(kernel, 0) + count
