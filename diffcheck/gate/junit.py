"""JUnit XML, as CI systems read it: a suite a subject, a case a rule.

Elements and attributes are those of https://github.com/testmoapp/junitxml, which GitLab, Jenkins and the actions of
GitHub agree on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from diffcheck.gate.rules import Ruling
from diffcheck.gate.subject import Subject

#: Characters that no XML 1.0 document may hold, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ELEMENT = {"broken": "failure", "not_comparable": "error", "undecided": "error"}


def junit(judged: Sequence[tuple[Subject, Sequence[Ruling]]]) -> str:
    """The document's text. Undecided rules and subjects that are not comparable are errors: not seen is no pass."""
    root = ET.Element("testsuites", name="rlk-diff gate")
    total = dict.fromkeys(("tests", "failures", "errors"), 0)
    for subject, rulings in judged:
        suite = ET.SubElement(root, "testsuite", name=_text(subject.name))
        if subject.properties:
            properties = ET.SubElement(suite, "properties")
            for name, value in subject.properties.items():
                ET.SubElement(properties, "property", name=_text(name), value=_text(value))
        counts = {"tests": len(rulings), "failures": 0, "errors": 0}
        for ruling in rulings:
            case = ET.SubElement(suite, "testcase", classname=_text(subject.name), name=_text(ruling.rule), time="0")
            if (element := _ELEMENT.get(ruling.outcome)) is None:
                ET.SubElement(case, "system-out").text = _text(ruling.found)
                continue
            ET.SubElement(case, element, type=ruling.outcome, message=_text(ruling.found))
            counts[f"{element}s"] += 1
        _count(suite, counts)
        suite.set("time", f"{subject.seconds or 0:.2f}")
        total = {name: total[name] + counts[name] for name in total}
    _count(root, total)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _count(element: ET.Element, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        element.set(name, str(count))


def _text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
