"""Two owners' measurements side by side: every digest that both files hold, in bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """One thing that both files measured."""

    what: str
    equal: bool
    left: str
    right: str


def compare(left: dict[str, Any], right: dict[str, Any]) -> list[Difference]:
    """Whatever both measured on the same inputs.

    Args:
        left, right: reports of `fastpath.measure.measure`.

    Raises:
        ValueError: not such a report, or of another schema; the message begins with ``left`` or ``right``.
    """
    for side, report in (("left", left), ("right", right)):
        if report.get("kind") != "rlk-measure":
            raise ValueError(f"{side}: field kind is {report.get('kind')!r}, not 'rlk-measure'")
        if report.get("schema") != 1:
            raise ValueError(f"{side}: field schema is {report.get('schema')!r}; this version reads 1")
        for field in ("device", "units", "primitives", "conformance"):
            if field not in report:
                raise ValueError(f"{side}: field {field} is missing")
    return [*_units(left, right), *_primitives(left, right), *_cases(left, right)]


def _units(left: dict[str, Any], right: dict[str, Any]) -> Iterator[Difference]:
    by_format: dict[str, list[dict[str, Any]]] = {}
    for unit in right["units"]:
        by_format.setdefault(unit["format"], []).append(unit)
    for unit in left["units"]:
        for other in by_format.get(unit["format"], []):
            same_vendor = left["device"]["runtime"] == right["device"]["runtime"]
            if unit["inputs"] != other["inputs"] or (same_vendor and unit["route"] != other["route"]):
                continue
            shared = sorted(set(unit["outputs"]) & set(other["outputs"]))
            unequal = [name for name in shared if unit["outputs"][name] != other["outputs"][name]]
            what = f"unit {unit['format']}, {unit['route']} and {other['route']}"
            if unequal:
                what += f": {len(unequal)} of {len(shared)} probes differ ({', '.join(unequal[:4])})"
            yield Difference(what, not unequal, _names(unit), _names(other))


def _names(unit: dict[str, Any]) -> str:
    return "; ".join(unit["reproduced_by"] or unit["searched"]) or "no known model"


def _primitives(left: dict[str, Any], right: dict[str, Any]) -> Iterator[Difference]:
    others = {entry["function"]: entry for entry in right["primitives"] if "digest" in entry}
    for entry in left["primitives"]:
        other = others.get(entry["function"])
        if other and "digest" in entry:
            pair = entry["digest"], other["digest"]
            yield Difference(f"primitive {entry['function']}", pair[0] == pair[1], pair[0][:16], pair[1][:16])


def _cases(left: dict[str, Any], right: dict[str, Any]) -> Iterator[Difference]:
    others = {case["name"]: case for case in right["conformance"].get("cases", [])}
    for case in left["conformance"].get("cases", []):
        other = others.get(case["name"])
        if other:
            said = ["reference's bits" if c["passed"] else f"{c['different']} differ" for c in (case, other)]
            # both passing is equal in bits: each holds the reference's
            yield Difference(f"kernel {case['name']}", case["passed"] and other["passed"], said[0], said[1])
