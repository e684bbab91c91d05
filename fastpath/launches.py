"""How often each kernel was launched, and under which contract. A replayed graph adds what its capture launched.

Counting is always on: it costs one dictionary update, and a run can then say what it executed without being repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from reference.contract.base import Contract

#: (kernel, identity of its contract) -> launches.
Counts = Mapping[tuple[str, int], int]

_counts: Counter[tuple[str, int]] = Counter()
#: Contracts by identity, kept alive so that no identity is used twice.
_contracts: dict[int, Contract] = {}


def count(kernel: str, contract: Contract) -> None:
    """Note one launch of ``kernel`` under ``contract``."""
    key = id(contract)
    if key not in _contracts:
        _contracts[key] = contract
    _counts[kernel, key] += 1


def snapshot() -> Counts:
    """The counts of now, for `since`."""
    return dict(_counts)


def since(before: Counts) -> Counts:
    """What was launched after ``before`` was taken."""
    return {key: n - before.get(key, 0) for key, n in _counts.items() if n != before.get(key, 0)}


def add(counts: Counts, times: int = 1) -> None:
    """Count ``counts`` once more (a replay), or take them back (``times`` -1: a capture executes nothing)."""
    for key, n in counts.items():
        _counts[key] += n * times


def clear() -> None:
    """Count from zero."""
    _counts.clear()


def by_operator() -> Counter[str]:
    """Operator -> launches of its kernels."""
    found: Counter[str] = Counter()
    for (_, key), n in _counts.items():
        found[_contracts[key].operator] += n
    return found


def evidence() -> dict[str, dict[str, Any]]:
    """Operator -> ``calls`` (launches), ``contract_id`` (several by commas), ``kernels`` (name -> launches)."""
    found: dict[str, dict[str, Any]] = {}
    for (kernel, key), n in sorted(_counts.items()):
        contract = _contracts[key]
        entry = found.setdefault(contract.operator, {"calls": 0, "contract_id": "", "kernels": {}})
        entry["calls"] += n
        entry["kernels"][kernel] = entry["kernels"].get(kernel, 0) + n
        if contract.contract_id not in entry["contract_id"]:
            entry["contract_id"] = ", ".join(filter(None, (entry["contract_id"], contract.contract_id)))
    return found
