"""What operators ran, added up over many calls of an engine, in one form whatever computed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def add_operators(total: dict[str, dict[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the operators of a strict path's evidence to ``total``: name -> ``calls``, ``contract_id`` and, of kernels,
    whose calls are launches, ``kernels`` by name; ``other_contract_ids``, if it ran under more than one.
    """
    for name, entry in found.items():
        ids = list(entry["contract_ids"] if "contract_ids" in entry else [entry["contract_id"]])
        known = total.setdefault(name, {"calls": 0, "contract_id": ids[0]})
        if others := set(ids) - {known["contract_id"]}:
            known["other_contract_ids"] = sorted(others | set(known.get("other_contract_ids", ())))
        known["calls"] += entry["launches"] if "launches" in entry else entry["calls"]
        for kernel, count in entry.get("kernels", {}).items():
            kernels = known.setdefault("kernels", {})
            kernels[kernel] = kernels.get(kernel, 0) + count
