"""What ``trace.json`` holds: the header of a trace folder, versioned and checked on reading."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from diffcheck.base.errors import TraceError
from diffcheck.base.record import ObjectRecord

SCHEMA = 1
HEADER = "trace.json"
Level = Literal["digest", "sampled", "full"]
#: Boundaries whose patterns are kept whole at every level: they are small, and every figure of mismatch comes from
#: them.
ALWAYS_STORED = ("logprobs",)
LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True)
class BoundaryEntry:
    """One boundary of a trace."""

    dtype: str
    #: [rows, width] of the logical global tensor.
    shape: tuple[int, int]
    #: `bits.digest_of_rows` over all rows, the same at every level.
    sha256: str
    #: "full": every row's patterns are stored; "sampled": those of the chosen rows; "digest": none. Row digests always
    #: are.
    level: str
    #: File with the tensors ``NAME`` (patterns), ``NAME#rows`` (stored row numbers, level sampled) and
    #: ``NAME#digests``.
    file: str


@dataclass
class Header:
    """The contents of ``trace.json``."""

    engine: str
    #: Package name -> version.
    versions: dict[str, str]
    tensor_parallel: int
    dtype: str
    phase: str
    level: str
    object: ObjectRecord
    boundaries: dict[str, BoundaryEntry]
    #: Samples as captured (`Sample.to_json`), responses included.
    samples: list[dict[str, Any]]
    #: Logprobs of the response tokens as the engine returned them are boundary "logprobs"; what really ran goes here.
    evidence: dict[str, Any] = field(default_factory=dict)
    #: What was changed on purpose: overrides and interventions, in words. Empty for an honest capture.
    changed: list[str] = field(default_factory=list)
    #: Boundary -> why it could not be observed, as the adapter says it.
    unobserved: dict[str, str] = field(default_factory=dict)
    #: SHA-256 of every tensor file.
    files: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, where: str) -> Header:
        """Parse and check; ``where`` names the file in errors.

        Raises:
            TraceError: not JSON, of a future schema, or a field missing, unknown or malformed.
        """
        remedy = "capture the trace again"
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise TraceError(f"{where}: not valid JSON ({error.msg}, line {error.lineno})", remedy) from None
        if not isinstance(data, dict) or "schema" not in data:
            raise TraceError(f"{where}: field 'schema' is missing: not a trace of rlk", remedy)
        if data["schema"] != SCHEMA:
            raise TraceError(
                f"{where}: schema {data['schema']}; this rlk reads schema {SCHEMA}",
                "use the rlk that wrote it, or capture again",
            )
        names = {f.name for f in fields(cls)}
        required = names - {"evidence", "changed", "unobserved", "files"}
        if missing := sorted(required - set(data)):
            raise TraceError(f"{where}: field {missing[0]!r} is missing", remedy)
        if unknown := sorted(set(data) - names):
            raise TraceError(f"{where}: unknown field {unknown[0]!r}", remedy)
        if data["level"] not in LEVELS:
            raise TraceError(f"{where}: level {data['level']!r} is none of {', '.join(LEVELS)}", remedy)
        try:
            entries = {
                name: BoundaryEntry(**{**entry, "shape": (int(entry["shape"][0]), int(entry["shape"][1]))})
                for name, entry in data["boundaries"].items()
            }
            return cls(**{**data, "object": ObjectRecord.from_json(data["object"]), "boundaries": entries})
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise TraceError(f"{where}: malformed: {error}", remedy) from None
