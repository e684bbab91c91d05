"""The table of ``docs/faults.md``: every fault, what must be named, and whether it was.

``python -m diffcheck.faults.table`` prints it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffcheck.faults.engines import describe as describe_run
from diffcheck.faults.laboratory import describe
from diffcheck.faults.library import CONTROLS, FAULTS
from diffcheck.faults.real_library import REAL_CONTROLS, REAL_FAULTS

RESULTS = Path(__file__).parent.parent / "results" / "faults.json"
_ENGINES = ("reference", "vllm", "megatron")
_HEADINGS = ("fault", "reported in", "what is wrong", "must be named first", "reference", "vLLM", "Megatron-core")


def markdown(results: Path = RESULTS) -> str:
    """The table, from the libraries and the outcomes in ``results``.

    Raises:
        OSError, ValueError, KeyError: no such file, or not one of results.
    """
    sections = json.loads(results.read_text())["engines"]
    found = {(o["fault"], o["engine"]): o for section in sections.values() for o in section["outcomes"]}
    rows = [_HEADINGS, ("---",) * len(_HEADINGS), *_rows(found)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows(found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    plain, real = {**FAULTS, **CONTROLS}, {**REAL_FAULTS, **REAL_CONTROLS}
    for name in dict.fromkeys((*FAULTS, *REAL_FAULTS, *CONTROLS, *REAL_CONTROLS)):
        own, runs = plain.get(name), real[name].runs if name in real else ()
        about = own or real[name]
        pairs = [*([("reference", describe(own), own)] if own else [])]
        pairs += [(run.engine, describe_run(run), run) for run in runs]  # type: ignore[misc]
        named: dict[str, None] = {}
        more: dict[str, None] = {}
        cells: dict[str, list[str]] = {engine: [] for engine in _ENGINES}
        for engine, described, injection in pairs:
            named[f"`{injection.where}`" if injection.where else "equal"] = None
            more |= dict.fromkeys(f"field `{field}`" for field in injection.fields)
            more |= {"inconclusive": None} if injection.verdict == "inconclusive" else {}
            cells[engine].append(_cell(described, found.get((name, described))))
        engines = ("; ".join(dict.fromkeys(cells[engine])) or "–" for engine in _ENGINES)
        yield f"`{name}`", about.reports, about.cause, ", ".join([" or ".join(named), *more]), *engines


def _cell(described: str, outcome: dict[str, Any] | None) -> str:
    """The kind of pair, if all was as expected; else also what was not."""
    engine, pair, *more = described.split(", ")
    kind = "yes" if engine == "reference" else ", ".join([pair.split()[0], *more])
    if outcome is None:
        return f"{kind}: not run"
    return f"{kind}: {', '.join(outcome['wrong'])}" if outcome["wrong"] else kind


if __name__ == "__main__":
    print(markdown(), end="")
