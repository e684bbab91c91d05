"""What a measurement says to its owner: what agrees with the reference, and what to change where it does not."""

from __future__ import annotations

from typing import Any

#: Model of `reference.dot` -> the file that states it.
FILES = {
    "fma32-seq": "reference/dot/fma32_seq.py",
    "mfma-cdna3-g8": "reference/dot/mfma_cdna3_g8.py (GROUPS, FRACTION_BITS, SUM_BITS, SIGNIFICANT_BITS)",
    "mfma-cdna2": "reference/dot/mfma_cdna2.py",
    "hopper-k16": "reference/dot/hopper_k16.py (parameters)",
    "ampere-k8": "reference/dot/ampere_k8.py (parameters)",
}


def findings(report: dict[str, Any]) -> list[dict[str, str]]:
    """Everything that differs from what the reference states: what was found, and the field, unit and file to change.

    A list without entries is agreement of all that was run, and says nothing of what was not.
    """
    found = [*map(_unit, report["units"]), *map(_primitive, report["primitives"])]
    found += [_case(case) for case in report["conformance"].get("cases", []) if not case["passed"]]
    return [entry for entry in found if entry]


def _unit(unit: dict[str, Any]) -> dict[str, str]:
    expected, by = unit["expected"], unit["reproduced_by"] or unit["searched"]
    if expected in by or (expected is None and by):
        return {}
    arrived = f"reproduced by {by[0]}" if by else "reproduced by no known model"
    what = f"unit {unit['format']}, {unit['route']}: {expected or 'no model stated'} expected, {arrived}"
    first = next((model["first"] for model in unit["models"] if model["model"] == expected), None)
    if first:
        what += f"; first at a = {first['a']}, b = {first['b']}, c = {first['c']}: "
        what += f"device {first['device']}, model {first['model']}"
    where = FILES.get(str(expected), "reference/dot (a new unit)")
    change = (
        f"contract field primitives.unit of linear, row_linear, lm_head and attention: choose {by[0]}"
        if by and by[0] in FILES
        else f"correct {where}, the unit that contract field primitives.unit = {expected!r} names"
    )
    return {"what": what, "change": change}


def _primitive(primitive: dict[str, Any]) -> dict[str, str]:
    if not primitive["different"] and not primitive.get("wrong_blocks"):
        return {}
    first = primitive["first"]
    at = f"; first at x = {first['x']}: device {first['device']}, reference {first['reference']}" if first else ""
    return {
        "what": f"primitive {primitive['function']}: {primitive['different']} or more inputs differ{at}",
        "change": f"fastpath/primitives.py: {primitive['function']} compiles to other operations on this device; "
        "no contract field describes them",
    }


def _case(case: dict[str, Any]) -> dict[str, str]:
    said = case["error"] or case["first"]
    return {
        "what": f"kernel {case['name']}: {case['different']} of {case['compared']} values differ: {said}",
        "change": f"if the unit of {case['unit']} differs above, that first; else report it with this file",
    }
