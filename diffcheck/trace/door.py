"""What a header must say of itself before anything is done with it: its parts fit each other, and no size in it can
make a reader work longer than its file is large.
"""

from __future__ import annotations

import re
from pathlib import Path

from diffcheck.base.bits import uint_type
from diffcheck.base.boundaries import graph
from diffcheck.base.errors import InputError, TraceError
from diffcheck.base.samples import Sample
from diffcheck.trace.schema import HEADER, Header
from reference.models.config import ModelConfig

_REMEDY = "the trace is damaged or foreign: copy it again, or capture it again"
#: Names that a tensor file can have: of a file in the folder itself, whatever the system.
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors")
#: Lists of the object record that run over samples.
_BY_SAMPLE = ("token_ids", "target_ids", "positions", "active")


def check_folder(folder: Path, header: Header) -> None:
    """Check the files of a trace and all that its header says.

    Raises:
        TraceError: a file is missing or outside the folder, or a field contradicts another; it is named.
    """
    for name in header.files:
        path = folder / name
        if not _FILE_NAME.fullmatch(name):
            raise TraceError(f"{folder / HEADER}: files: {name!r} is no name of a file in the trace's folder", _REMEDY)
        if path.is_symlink():
            raise TraceError(f"{path}: is a link, which may lead out of the trace's folder", "copy the file itself")
        if not path.is_file():
            raise TraceError(f"{path}: listed in {HEADER} but missing", _REMEDY)
    try:
        _check(header, str(folder))
    except (InputError, TypeError, ValueError) as error:
        raise TraceError(f"{folder / HEADER}: {error}", _REMEDY) from None


def _check(header: Header, folder: str) -> None:
    samples = [Sample.from_json(s, f"sample {i}") for i, s in enumerate(header.samples)]
    record = header.object
    for name in _BY_SAMPLE:
        count = len(getattr(record, name))
        if count != len(samples) and name not in record.unknown:
            raise ValueError(f"object record: {name} of {count} samples, of which there are {len(samples)}")
    rows = {
        "all": sum(s.forward_length for s in samples),
        "response": sum(len(s.response_token_ids) for s in samples),
    }
    known = {"logprobs": ("response", 1)}
    if record.model:
        config = ModelConfig(**record.model)
        if not 0 < record.real_vocab <= config.vocab_size:
            raise ValueError(f"object record: real_vocab {record.real_vocab} of {config.vocab_size}")
        known = {node.name: (node.rows, node.width) for node in graph(config, header.tensor_parallel)}
    elif "model" not in record.unknown:
        raise ValueError("object record: model is empty")
    for name, entry in header.boundaries.items():
        if name not in known:
            raise ValueError(f"boundary {name!r} is none of the model's")
        try:
            uint_type(entry.dtype)
        except ValueError as error:
            raise ValueError(f"boundary {name}: {error}") from None
        kind, width = known[name]
        if entry.shape != (rows[kind], width):
            raise ValueError(f"boundary {name}: shape {entry.shape}, expected {(rows[kind], width)}")
        if entry.file not in header.files:
            raise ValueError(f"boundary {name}: file {entry.file!r} is not in 'files'")
