"""What ``trace.json`` holds: the header of a trace folder, versioned and checked on reading."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from diffcheck.base.documents import MIB, DocumentError, finite, parse_json
from diffcheck.base.errors import TraceError
from diffcheck.base.record import ObjectRecord

SCHEMA = 2
#: The schema before this one: without a seal. It is read, with a warning.
UNSEALED = 1
HEADER = "trace.json"
#: Field that holds the digest of the file it is in.
SEAL = "header_sha256"
_BLANK = "0" * 64
#: Bytes of the largest header that is read: of some million tokens.
HEADER_LIMIT = 256 * MIB
Level = Literal["digest", "sampled", "full"]
#: Boundaries whose patterns are kept whole at every level: they are small, and every figure of mismatch comes from
#: them.
ALWAYS_STORED = ("logprobs",)
#: Rows or features of a boundary.
Size = Annotated[int, Meta(ge=0, le=1 << 40)]
LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True)
class BoundaryEntry:
    """One boundary of a trace."""

    dtype: str
    #: [rows, width] of the logical global tensor.
    shape: tuple[Size, Size]
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
    tensor_parallel: Annotated[int, Meta(ge=1, le=1024)]
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
        """The text of ``trace.json``, sealed: see `seal`."""
        return seal(asdict(self))

    @classmethod
    def from_json(cls, text: bytes, where: str) -> Header:
        """Parse and check; ``where`` names the file in errors.

        Raises:
            TraceError: not JSON, of a future schema, changed since it was written, or a field missing, unknown or of
                another type or range.
        """
        remedy = "capture the trace again"
        try:
            # Schema 1 wrote the literals of Python for logprobs that are no numbers.
            data = parse_json(text, literals=SEAL.encode() not in text)
        except DocumentError as error:
            raise TraceError(f"{where}: {error}", remedy) from None
        if not isinstance(data, dict) or "schema" not in data:
            raise TraceError(f"{where}: field 'schema' is missing: not a trace of rlk", remedy)
        if type(data["schema"]) is not int or data["schema"] not in (UNSEALED, SCHEMA):
            raise TraceError(
                f"{where}: schema {data['schema']!r}; this rlk reads schema {SCHEMA}, and {UNSEALED}",
                "use the rlk that wrote it, or capture again",
            )
        if data["schema"] == SCHEMA and not is_sealed(text, data.pop(SEAL, None)):
            raise TraceError(f"{where}: was changed after it was written: {SEAL} is not its digest", remedy)
        names = {f.name for f in fields(cls)}
        required = names - {"evidence", "changed", "unobserved", "files"}
        if missing := sorted(required - set(data)):
            raise TraceError(f"{where}: field {missing[0]!r} is missing", remedy)
        if unknown := sorted(set(data) - names):
            raise TraceError(f"{where}: unknown field {unknown[0]!r}", remedy)
        if data["level"] not in LEVELS:
            raise TraceError(f"{where}: level {data['level']!r} is none of {', '.join(LEVELS)}", remedy)
        try:
            if isinstance(data["object"], dict):
                ObjectRecord.check_fields(data["object"])
            return msgspec.convert(data, cls)
        except ValueError as error:
            raise TraceError(f"{where}: malformed: {error}", remedy) from None


def seal(header: Mapping[str, Any]) -> str:
    """The text of a header with its own digest in it: field `SEAL` holds the SHA-256 of the text in which that field
    holds 64 zeros. One bit that changes anywhere shows, white space included.
    """
    data = {**header, SEAL: _BLANK}
    try:
        text = json.dumps(data, indent=1, sort_keys=True, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(data), indent=1, sort_keys=True, allow_nan=False)
    field = f'"{SEAL}": "{_BLANK}"'
    return text.replace(field, field.replace(_BLANK, hashlib.sha256(text.encode()).hexdigest()), 1)


def is_sealed(text: bytes, digest: object) -> bool:
    """Whether ``digest``, the field `SEAL` of ``text``, is that of the rest."""
    field = b'"%s": "%s"' % (SEAL.encode(), str(digest).encode())
    if not isinstance(digest, str) or len(digest) != len(_BLANK) or text.count(field) != 1:
        return False
    blank = text.replace(field, field.replace(digest.encode(), _BLANK.encode()))
    return hashlib.sha256(blank).hexdigest() == digest
